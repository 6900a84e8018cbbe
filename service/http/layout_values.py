"""The values of a layout's items as numbers, and what these mean."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.centers import Centers
from mlcd.collections.clusters import Clusters
from mlcd.collections.columns import Scalar
from mlcd.collections.plane import Plane
from mlcd.wire.found_items import LayoutLegendEntry

_MOST_NAMED: Final = 1000


@dataclass(frozen=True)
class LayoutValues:
    """A number for each item of a layout, int32 [N], -1 where it is unknown, and their legend."""

    numbers: NDArray[np.int32]
    legend: list[LayoutLegendEntry]


def values_by_center(layout: Plane, clusters: Clusters, centers: Centers) -> LayoutValues:
    """Returns the centers' ids. Items that came or went since the layout was made are unknown."""
    found = clusters.centers()
    numbers = np.full(len(layout.positions), -1, dtype=np.int32)
    if clusters.searcher.generation is layout.searcher.generation:
        known = layout.positions < len(found)
        numbers[known] = found[layout.positions[known]]
    order = np.argsort(-clusters.num_members, kind="stable")[:_MOST_NAMED]
    legend = [
        LayoutLegendEntry(index=center, value=center, name=centers.name(center), items=int(num))
        for center in order.tolist()
        if (num := clusters.num_members[center])
    ]
    return LayoutValues(numbers, legend)


def values_by_field(layout: Plane, field: str) -> LayoutValues:
    """Returns the ranks of a metadata field's values by number of items.

    A list counts as one value, that of its entries with commas. A field that no item has is unknown
    for all of them.
    """
    searcher = layout.searcher
    column = searcher.columns.find(field)
    if column is None:
        return LayoutValues(np.full(len(layout.positions), -1, dtype=np.int32), [])
    codes = column.codes(searcher.num_positions)[layout.positions]
    found, nums = np.unique(codes[codes >= 0], return_counts=True)
    shown = {code: _shown(column.values[code]) for code in found.tolist()}
    order = sorted(range(len(found)), key=lambda i: (-int(nums[i]), str(shown[int(found[i])])))
    ranks = np.full(int(found[-1]) + 2 if len(found) else 1, -1, dtype=np.int32)
    ranks[found[order]] = np.arange(len(found), dtype=np.int32)
    legend = [
        LayoutLegendEntry(index=rank, value=shown[int(found[i])], name=None, items=int(nums[i]))
        for rank, i in enumerate(order[:_MOST_NAMED])
    ]
    # the last entry is the one that -1 points at
    return LayoutValues(ranks[codes], legend)


def _shown(value: tuple[Scalar, ...]) -> Scalar:
    return value[0] if len(value) == 1 else ", ".join(map(str, value))
