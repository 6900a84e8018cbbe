"""The outside check: real photographs that have several tags, by a teacher's features."""

import csv
import json
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.types import unit_rows
from studies.losses.frozen.features import PRETRAINING, Features
from studies.losses.instrument.asked import AskedTags

COCO: Final = "coco_multi_captions"
FASHION: Final = "fashion_products"
_FACETS: Final = ("gender", "subCategory", "articleType", "baseColour", "usage")
_MIN_TAGGED: Final = 5  # images that have a tag for it to count


@lru_cache(maxsize=1)
def tagged_sets(features: Features, teacher: str) -> tuple[AskedTags, ...]:
    """Returns COCO's photographs with their objects, and fashion's with their attributes."""
    mean = features.embed(teacher, PRETRAINING).load().mean(axis=0)
    return tuple(
        _tagged(name, features.embed(teacher, name), tags, mean)
        for name, tags in (
            (COCO, _objects(features.data / COCO)),
            (FASHION, _attributes(features.data / FASHION)),
        )
    )


def _tagged(
    name: str, stored: EmbeddingsArtifact, by_key: dict[str, set[str]], mean: np.ndarray
) -> AskedTags:
    kept = [row for row, key in enumerate(stored.keys) if by_key.get(key)]
    own = [by_key[stored.keys[row]] for row in kept]
    names = sorted(set().union(*own))
    tags = np.array([[tag in each for tag in names] for each in own])
    common = tags.sum(axis=0) >= _MIN_TAGGED
    return AskedTags(name, unit_rows(stored.load()[kept] - mean), tags[:, common])


def _objects(folder: Path) -> dict[str, set[str]]:
    lines = map(json.loads, (folder / "labels.jsonl").read_text().splitlines())
    return {line["path"]: set(line["labels"]) for line in lines}


def _attributes(folder: Path) -> dict[str, set[str]]:
    with (folder / "labels.csv").open(newline="") as file:
        return {
            line["path"]: {f"{facet}={line[facet]}" for facet in _FACETS}
            for line in csv.DictReader(file)
        }
