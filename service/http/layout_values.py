"""The values of a layout's items as numbers, with a legend."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.centers import Centers
from mlcd.collections.clusters import Clusters
from mlcd.collections.columns import Scalar
from mlcd.collections.plane import Plane
from mlcd.wire.item_search import LayoutLegendEntry

_MAX_LEGEND_ENTRIES: Final = 1000


@dataclass(frozen=True)
class LayoutValues:
    """A number for each item of a layout, int32 [N], -1 if unknown, and their legend."""

    numbers: NDArray[np.int32]
    legend: list[LayoutLegendEntry]


def values_by_center(layout: Plane, clusters: Clusters, centers: Centers) -> LayoutValues:
    """Returns each item's center id; -1 for items added or removed after the layout was built."""
    center_ids = clusters.centers()
    numbers = np.full(len(layout.positions), -1, dtype=np.int32)
    if clusters.state.generation is layout.state.generation:
        is_known = layout.positions < len(center_ids)
        numbers[is_known] = center_ids[layout.positions[is_known]]
    order = np.argsort(-clusters.num_members, kind="stable")[:_MAX_LEGEND_ENTRIES]
    legend = [
        LayoutLegendEntry(index=center, value=center, name=centers.name(center), items=int(num))
        for center in order.tolist()
        if (num := clusters.num_members[center])
    ]
    return LayoutValues(numbers, legend)


def values_by_field(layout: Plane, field: str) -> LayoutValues:
    """Returns the rank of each item's value of a metadata field; the most frequent value has 0.

    A list counts as one value: its entries, joined by commas. -1 for items without the field.
    """
    state = layout.state
    column = state.columns.find(field)
    if column is None:
        return LayoutValues(np.full(len(layout.positions), -1, dtype=np.int32), [])
    codes = column.codes(state.num_positions)[layout.positions]
    distinct, nums = np.unique(codes[codes >= 0], return_counts=True)
    value_of_code = {code: _to_scalar(column.values[code]) for code in distinct.tolist()}
    order = sorted(
        range(len(distinct)), key=lambda i: (-int(nums[i]), str(value_of_code[int(distinct[i])]))
    )
    ranks = np.full(int(distinct[-1]) + 2 if len(distinct) else 1, -1, dtype=np.int32)
    ranks[distinct[order]] = np.arange(len(distinct), dtype=np.int32)
    legend = [
        LayoutLegendEntry(
            index=rank, value=value_of_code[int(distinct[i])], name=None, items=int(nums[i])
        )
        for rank, i in enumerate(order[:_MAX_LEGEND_ENTRIES])
    ]
    # code -1 indexes the last entry, which stays -1
    return LayoutValues(ranks[codes], legend)


def _to_scalar(value: tuple[Scalar, ...]) -> Scalar:
    return value[0] if len(value) == 1 else ", ".join(map(str, value))
