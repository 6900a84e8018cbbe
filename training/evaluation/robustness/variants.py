"""The variants of ImageNet, and the classes of their folders.

    DATA/imagenet_v2/0/*.jpeg            index of the class, in the order of WordNet's ids
    DATA/imagenet_a/n01498041/*.jpg      WordNet's id; also imagenet_r and imagenet_sketch
    DATA/objectnet/images/alarm_clock/*  ObjectNet's own names
    DATA/objectnet/mappings/*.json       class names and ImageNet classes, from the data set

ObjectNet's map is read from the data set itself; the other maps are in
`mlcd.training.evaluation.texts.imagenet`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mlcd.errors import InvalidInput, NotFound
from mlcd.training.evaluation.texts.imagenet import imagenet_names, variant_ids

_OBJECTNET: Final = "objectnet"
_LABELS: Final = "folder_to_objectnet_label.json"
_OVERLAP: Final = "objectnet_to_imagenet_1k.json"


@dataclass(frozen=True)
class Variant:
    """One variant, with its published numbers of images and classes.

    templates: prompt templates; None uses the set `simple`.
    """

    name: str
    title: str
    images: int
    classes: int
    templates: tuple[str, ...] | None = None


VARIANTS: Final = (
    Variant("imagenet_v2", "ImageNet-V2", 10_000, 1_000),
    Variant("imagenet_a", "ImageNet-A", 7_500, 200),
    Variant("imagenet_r", "ImageNet-R", 30_000, 200),
    Variant("imagenet_sketch", "ImageNet-Sketch", 50_889, 1_000),
    # Its classes are tested by their bare names.
    Variant(_OBJECTNET, "ObjectNet", 18_574, 113, ("{}",)),
)


@dataclass(frozen=True)
class ClassMap:
    """The classes of a variant.

    names: class name by id. class_of: class id by folder. partial: leave out images of other
    folders, instead of raising.
    """

    names: Mapping[str, str]
    class_of: Mapping[str, str]
    partial: bool = False

    @property
    def sha256(self) -> str:
        table = json.dumps([dict(self.names), dict(self.class_of)], sort_keys=True)
        return hashlib.sha256(table.encode()).hexdigest()


def class_map(variant: Variant, folder: Path) -> ClassMap:
    """Returns the classes of the variant in `folder`.

    Raises NotFound or InvalidInput if ObjectNet's map is missing or damaged.
    """
    if variant.name == _OBJECTNET:
        return _read_objectnet(folder / "mappings")
    names = imagenet_names()
    if variant.name == "imagenet_v2":
        return ClassMap(names, {str(index): wnid for index, wnid in enumerate(names)})
    chosen = variant_ids(variant.name)
    return ClassMap({wnid: names[wnid] for wnid in chosen}, {wnid: wnid for wnid in chosen})


def _read_objectnet(mappings: Path) -> ClassMap:
    """Returns the classes that ObjectNet shares with ImageNet, with ObjectNet's names."""
    labels, overlap = (_read(mappings / name) for name in (_LABELS, _OVERLAP))
    folder_of = {label: folder for folder, label in labels.items()}
    unknown = next((label for label in overlap if label not in folder_of), None)
    if unknown is not None:
        raise InvalidInput(
            f"{mappings / _OVERLAP} names {unknown!r}, which {_LABELS} does not",
            remedy="restore both from the data set",
        )
    shared = {folder_of[label]: label.lower() for label in overlap}
    return ClassMap(shared, {folder: folder for folder in shared}, partial=True)


def _read(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise NotFound(f"{path} is missing", remedy="restore it from the data set")
    try:
        texts = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON", remedy="restore it") from error
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise InvalidInput(
            f"{path} must be a JSON object whose values are texts", remedy="restore it"
        )
    return texts
