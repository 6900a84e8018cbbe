"""Builds prompts from class names, and averages a name's prompt embeddings.

The templates come from OpenAI's CLIP; its license is beside them.
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

PLACE: Final = "{}"  # the placeholder of the name in a template
_FILE: Final = Path(__file__).parent / "prompt_templates.json"


@cache
def templates(name: TemplateSet) -> tuple[str, ...]:
    """Returns a set of templates.

    plain: one template. simple: seven, nearly as good as `clip` on ImageNet. clip: the eighty that
    CLIP was evaluated with.
    """
    return tuple(json.loads(_FILE.read_text(encoding="utf-8"))[name])


def prompt(template: str, name: str) -> str:
    """Returns the template with {} replaced by the name.

    Raises InvalidInput for a template that does not contain {} exactly once.
    """
    if template.count(PLACE) != 1:
        raise InvalidInput(f"a template must contain {PLACE} exactly once, got {template!r}")
    return template.replace(PLACE, name)


def class_rows(prompts: NDArray[np.floating]) -> Embeddings:
    """Returns the mean of each name's prompt rows as a unit row: [C, T, D] to [C, D]."""
    return unit_rows(prompts.mean(axis=1, dtype=np.float64))
