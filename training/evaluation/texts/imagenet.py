"""ImageNet's classes: WordNet's ids in order, CLIP's names, and the classes of its variants.

imagenet.json states their origin. CLIP calls two classes `missile` and two `sunglasses`.
"""

import json
from functools import cache
from importlib.resources import files
from typing import Any, Final

IMAGENET: Final = "imagenet"  # the name of the data set
_FILE: Final = f"{IMAGENET}.json"


@cache
def _read_classes() -> dict[str, Any]:
    text = files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    classes: dict[str, Any] = json.loads(text)
    return classes


def imagenet_names() -> dict[str, str]:
    """Returns CLIP's names of the 1,000 classes by WordNet's id, in the order of the ids."""
    return dict(_read_classes()["classes"])


def variant_ids(variant: str) -> list[str]:
    """Returns the ids of a variant's classes: 200 of imagenet_a and imagenet_r, else all."""
    ids: list[str] = _read_classes().get(variant) or list(imagenet_names())
    return ids
