"""The members of a center in answers: pages of members, and counts of a metadata field's values."""

from collections import Counter
from typing import Any

import numpy as np
import orjson

from mlcd.collections.clusters import Clusters
from mlcd.collections.columns import Scalar
from mlcd.collections.port import CollectionPort
from mlcd.service.http.cursors import read_cursor, write_cursor
from mlcd.wire.nearest_centers import CountedValue


def build_member_page(
    collection: CollectionPort, clusters: Clusters, center: int, *, limit: int, cursor: str | None
) -> dict[str, Any]:
    """Returns a page of members, nearest first, with their total number and the next cursor."""
    member_slice = clusters.members(center)
    first = member_slice.start
    if cursor is not None:
        similarity, item_id = read_cursor(cursor, float, str)
        first = clusters.behind(center, similarity, item_id)
    last = min(first + limit, member_slice.stop)
    state = clusters.state
    positions = clusters.positions[first:last].tolist()
    similarities = clusters.similarities[first:last].tolist()
    ids = [state.ids[position] for position in positions]
    versions = collection.thumbnail_versions(ids)
    return {
        "total": member_slice.stop - member_slice.start,
        "members": [
            {
                "id": item_id,
                "similarity": similarity,
                "metadata": orjson.Fragment(state.metadata[position]),
                "thumbnail": version,
            }
            for position, item_id, similarity, version in zip(
                positions, ids, similarities, versions, strict=True
            )
        ],
        "next": write_cursor(similarities[-1], ids[-1]) if last < member_slice.stop else None,
    }


def rank_values(
    clusters: Clusters, center: int, field: str, limit: int
) -> tuple[list[CountedValue], int, int]:
    """Returns the `limit` most frequent values of a field among a center's members, the number of
    members that have only rarer values, and the number of members without a value.
    """
    state = clusters.state
    column = state.columns.find(field)
    if column is None:
        members = clusters.members(center)
        return [], 0, members.stop - members.start
    codes = column.codes(state.num_positions)[clusters.positions[clusters.members(center)]]
    distinct, nums = np.unique(codes[codes >= 0], return_counts=True)
    num_by_value: Counter[tuple[type, Scalar]] = Counter()
    for code, num in zip(distinct.tolist(), nums.tolist(), strict=True):
        for value in {(type(part), part) for part in column.values[code]}:
            num_by_value[value] += num
    order = sorted(num_by_value.items(), key=lambda entry: (-entry[1], str(entry[0][1])))
    top_values = {value for value, _ in order[:limit]}
    num_others = sum(
        num
        for code, num in zip(distinct.tolist(), nums.tolist(), strict=True)
        if column.values[code]
        and not top_values & {(type(part), part) for part in column.values[code]}
    )
    num_empty = sum(
        num
        for code, num in zip(distinct.tolist(), nums.tolist(), strict=True)
        if not column.values[code]
    )
    counts = [CountedValue(value=value, items=num) for (_, value), num in order[:limit]]
    return counts, num_others, int((codes < 0).sum()) + num_empty
