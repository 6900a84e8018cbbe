"""CLIP's classes and templates of 26 data sets, under its license, which lies with them."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

_FILE: Final = "prompts.json"


@dataclass(frozen=True)
class SetPrompts:
    """The prompts of a data set.

    classes: the names of each class, one or more. templates: each with {} in a name's place.
    """

    classes: tuple[tuple[str, ...], ...]
    templates: tuple[str, ...]


@cache
def set_prompts() -> dict[str, SetPrompts]:
    """Returns the prompts of each data set, by its name."""
    content = json.loads(files(__package__).joinpath(_FILE).read_text(encoding="utf-8"))
    return {
        name: SetPrompts(tuple(map(tuple, entry["classes"])), tuple(entry["templates"]))
        for name, entry in content["sets"].items()
    }
