"""Prompts around names, and the one row that stands for a name's prompts.

The templates are those of OpenAI's CLIP, under its license, which lies with them.
"""

import json
from functools import cache
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import InvalidInput
from mlcd.types import Embeddings, unit_rows

TemplateSet = Literal["plain", "simple", "clip"]

PLACE: Final = "{}"  # where the name stands
_FILE: Final = Path(__file__).parent / "prompt_templates.json"


@cache
def templates(name: TemplateSet) -> tuple[str, ...]:
    """Returns a set of templates.

    plain: one. simple: seven, nearly as good as all on ImageNet. clip: the eighty that CLIP was
    measured with.
    """
    return tuple(json.loads(_FILE.read_text(encoding="utf-8"))[name])


def prompt(template: str, name: str) -> str:
    """Returns the name in the place that the template leaves for it.

    Raises InvalidInput for a template without exactly one place.
    """
    if template.count(PLACE) != 1:
        raise InvalidInput("a template must contain {} exactly once, as the place of the name")
    return template.replace(PLACE, name)


def class_rows(prompts: NDArray[np.floating]) -> Embeddings:
    """Returns one unit row a name: [C, T, D] of unit rows to [C, D], each the mean of T rows."""
    return unit_rows(prompts.mean(axis=1, dtype=np.float64))
