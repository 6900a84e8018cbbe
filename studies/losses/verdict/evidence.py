"""The rows of a tier as values by arm and seed, and as bits of every asked image.

Shapes: S seeds, N images.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ArtifactInvalid
from studies.losses.instrument.asked import ASKED, HELD_OUT

# The measures that are means over the four sets of unseen classes, which weigh alike.
UNSEEN: Final = "unseen"
PROBE: Final = "probe"
OF_HELD_OUT: Final = f"knn_{HELD_OUT}"
_PREFIX: Final = {UNSEEN: "knn", PROBE: "probe"}
# The images of each set, in the order of a row's bits.
SET_SIZES: Final = {
    HELD_OUT: 4000,
    "tiny_imagenet_30": 10_500,
    "cifar10_jpg": 5000,
    "caltech101_20": 800,
    "fashion_products": 3000,
}

# The ResNet-20 was trained on CIFAR-10, and 4,000 of cifar10_jpg are photographs that it has seen.
# MobileNetV2 has seen ImageNet, of which tiny_imagenet_30 is a part. The page says so: it counts.
_SEEN: Final = {"resnet20": ("cifar10_jpg",)}

Row = Mapping[str, Any]
ByArm = dict[str, dict[int, float]]


def unseen_sets(row: Row) -> tuple[str, ...]:
    """Returns the sets that count as unseen classes for the teacher of a run."""
    seen = _SEEN.get(row.get("teacher", ""), ())
    return tuple(name for name in ASKED if name not in seen)


def value_of(row: Row, measure: str) -> float:
    """Returns a measure of a run; measure: UNSEEN, PROBE, or a column."""
    if measure in _PREFIX:
        return float(np.mean([row[f"{_PREFIX[measure]}_{name}"] for name in unseen_sets(row)]))
    return float(row[measure])


def by_arm(rows: Iterable[Row], measure: str) -> ByArm:
    """Returns the values of each arm by seed, where it has the measure."""
    found: ByArm = defaultdict(dict)
    for row in rows:
        if measure in _PREFIX or row.get(measure) is not None:
            found[row["arm"]][row["seed"]] = value_of(row, measure)
    return dict(found)


def mean_of(rows: Iterable[Row], measure: str) -> float:
    return float(np.mean([value_of(row, measure) for row in rows]))


def where(rows: Iterable[Row], **fields: Any) -> list[Row]:
    """Returns the rows that have all of these values."""
    return [row for row in rows if all(row.get(name) == each for name, each in fields.items())]


def right_bits(
    rows: Sequence[Row], sizes: Mapping[str, int] = SET_SIZES
) -> dict[str, NDArray[np.bool_]]:
    """Returns for each set which images each run had right, [S, N].

    Raises ArtifactInvalid where the bits are not those of the row's accuracies.
    """
    total = sum(sizes.values())
    packed = np.stack([np.frombuffer(row["right"], np.uint8) for row in rows])
    bits = np.unpackbits(packed, axis=1)[:, :total].astype(np.bool_)
    found, start = {}, 0
    for name, size in sizes.items():
        found[name] = bits[:, start : start + size]
        start += size
        stated = [row[f"knn_{name}"] for row in rows]
        if found[name].shape[1] != size or not np.allclose(found[name].mean(axis=1), stated):
            raise ArtifactInvalid(
                f"the bits of {rows[0]['run']} are not those of {name}",
                remedy="were the rows made on other data sets?",
            )
    return found
