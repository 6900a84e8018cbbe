"""CLIP's class names and templates of 26 data sets, under CLIP's license, which is beside them."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

_FILE: Final = "prompts.json"


@dataclass(frozen=True)
class SetPrompts:
    """The prompts of a data set.

    classes: one or more names of each class. templates: each with {} for the name.
    """

    classes: tuple[tuple[str, ...], ...]
    templates: tuple[str, ...]


@cache
def set_prompts() -> dict[str, SetPrompts]:
    """Returns the prompts of each data set, by name."""
    content = json.loads(files(__package__).joinpath(_FILE).read_text(encoding="utf-8"))
    return {
        name: SetPrompts(tuple(map(tuple, entry["classes"])), tuple(entry["templates"]))
        for name, entry in content["sets"].items()
    }
