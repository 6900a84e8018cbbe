"""The changes that keep the ids of clusters: each makes new centers of old ones, by the fields of
one step of a journal.

Nothing here reads a clock or a path: the same step on the same rows makes the same centers.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mlcd.artifacts.center_levels import LEVELS, read_level_centers, write_levels
from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.examples import Examples
from mlcd.artifacts.living_centers import LivingCenters
from mlcd.artifacts.manifest import Artifact
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.members import NUM_EXAMPLES, NearestMembers
from mlcd.clustering.nearest import nearest_with_distances
from mlcd.clustering.novelty import matched, new_centers, own_quantiles
from mlcd.errors import InvalidInput
from mlcd.types import Embeddings, unit_rows

_LEAST: Final = 5  # images of a new cluster
Step = Mapping[str, Any]
# the artifacts that a step uses, by digest
Given = Mapping[str, Artifact]
Changed = tuple[LivingCenters, dict[str, Any]]


def changed(state: LivingCenters, step: Step, given: Given) -> Changed:
    """Returns the centers after one step, and facts about it.

    Raises InvalidInput where the step cannot be taken.
    """
    return _CHANGES[step["change"]](state, step, given)


def _updated(state: LivingCenters, step: Step, given: Given) -> Changed:
    centers, added = state.centers, EmbeddingsArtifact(given[step["added"]])
    num, quantiles = len(centers.vectors), state.quantiles
    if "members" in step:
        members = EmbeddingsArtifact(given[step["members"]])
        own, distances = nearest_with_distances(_rows(centers, members), centers.vectors)
        measured = own_quantiles(own, distances, num, step["quantile"])
        quantiles = np.where(np.isnan(quantiles), measured, quantiles)
    rows = _rows(centers, added)
    found, aside = new_centers(
        rows,
        centers.vectors,
        quantiles,
        typical=int(np.median(centers.sizes[centers.sizes > 0])),
        num=step["new"],
        least=_LEAST,
        seed=step["seed"],
    )
    vectors = np.concatenate([centers.vectors, found])
    now, distances = nearest_with_distances(rows, vectors)
    joined = now >= num
    sizes = np.bincount(now, minlength=len(vectors))
    sizes[:num] += centers.sizes
    examples = centers.examples
    if examples is not None and len(found):
        examples = examples.extended(_examples(added, joined, now - num, distances, len(found)))
    if len(found):
        new = own_quantiles(now[joined] - num, distances[joined], len(found), step["quantile"])
        quantiles = np.concatenate([quantiles, new])
    changed = replace(
        state,
        centers=replace(
            centers, vectors=vectors, sizes=sizes, examples=examples, names=None, audit_rows=None
        ),
        quantiles=quantiles,
        clusters=np.concatenate([state.clusters, np.arange(num, len(vectors), dtype=np.int32)]),
    )
    facts = {
        "new": len(found),
        "images": len(rows),
        "aside": int(aside.sum()),
        "in_new": int(joined.sum()),
        "still_beyond": int((distances > quantiles[now]).sum()),
    }
    return changed, facts


def _merged(state: LivingCenters, step: Step, _: Given) -> Changed:
    ids = step["ids"]
    if len(ids) < 2 or len(set(ids)) < len(ids):
        raise InvalidInput("that is nothing to merge", remedy="give two ids or more")
    for each in ids:
        _check_id(state, each)
    joined = np.isin(state.clusters, state.clusters[ids])
    clusters = np.where(joined, state.clusters[ids].min(), state.clusters).astype(np.int32)
    return replace(state, clusters=clusters), {"merged": len(ids)}


def _divided(state: LivingCenters, step: Step, given: Given) -> Changed:
    centers, center = state.centers, step["id"]
    _check_id(state, center)
    members = EmbeddingsArtifact(given[step["members"]])
    rows = _rows(centers, members)
    own, _ = nearest_with_distances(rows, centers.vectors)
    inside = own == center
    result = kmeans([rows[inside]], 2, seed=step["seed"]) if inside.sum() > 1 else None
    if result is None or not result.sizes.all():
        raise InvalidInput(
            f"cluster {center} cannot be split", remedy="give embeddings with two images of it"
        )
    order = np.argsort(-result.sizes, kind="stable")
    first, second = result.centers[order]
    vectors = np.concatenate([centers.vectors, second[None]])
    vectors[center] = first
    sizes = np.append(centers.sizes, 0)
    # the members that are not among these rows are shared out in the same way
    sizes[-1] = round(sizes[center] * result.sizes[order[1]] / result.sizes.sum())
    sizes[center] -= sizes[-1]
    part, distances = nearest_with_distances(rows, np.stack([first, second]))
    parts = own_quantiles(part[inside], distances[inside], 2, step["quantile"])
    quantiles = np.append(state.quantiles, parts[1])
    quantiles[center] = parts[0]
    examples = centers.examples
    if examples is not None:
        kept, new = (
            _examples(members, inside & (part == each), np.zeros_like(part), distances, 1)
            for each in (0, 1)
        )
        examples = examples.with_center(center, kept).extended(new)
    changed = replace(
        state,
        centers=replace(
            centers, vectors=vectors, sizes=sizes, examples=examples, names=None, audit_rows=None
        ),
        quantiles=quantiles.astype(np.float32),
        clusters=np.append(state.clusters, np.int32(len(vectors) - 1)),
    )
    return changed, {"new": 1, "images": int(inside.sum())}


def _aligned(state: LivingCenters, step: Step, given: Given) -> Changed:
    centers, others = state.centers, LivingCenters.read(given[step["to"]]).centers
    members = EmbeddingsArtifact(given[step["members"]])
    ids, _ = nearest_with_distances(_rows(centers, members), centers.vectors)
    rows = _rows(others, members)
    now, distances = nearest_with_distances(rows, others.vectors)
    num, num_others = len(centers.vectors), len(others.vectors)
    own = state.clusters[ids]
    found = matched(own, now, (num, num_others))
    fresh = np.flatnonzero(found < 0)
    found[fresh] = num + np.arange(len(fresh))
    clusters = _heirs(ids, found[now], num, found)
    vectors = np.empty((len(clusters), others.vectors.shape[1]), np.float32)
    vectors[found] = others.vectors
    vectors = vectors[clusters]  # an id without a counterpart has the center of its heir
    sizes = np.zeros(len(clusters), np.int64)
    sizes[found] = others.sizes
    examples = None
    if others.examples is not None:
        examples = _examples(
            members, np.ones(len(rows), np.bool_), found[now], distances, len(clusters)
        )
    quantiles = own_quantiles(found[now], distances, len(clusters), step["quantile"])
    changed = replace(
        state,
        centers=replace(others, vectors=vectors, sizes=sizes, examples=examples, names=None),
        quantiles=quantiles[clusters],
        clusters=clusters,
    )
    facts = {
        "kept": num_others - len(fresh),
        "new": len(fresh),
        "images": len(rows),
        "stay": float((found[now] == own).mean()),
    }
    return changed, facts


def _heirs(
    ids: NDArray[np.int32], now: NDArray[np.int64], num: int, found: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Returns the cluster of each id after an alignment.

    ids, now: the id of each row before, and its cluster now. num: how many ids there were. found:
    the ids that the clusters have now. An id that none has goes where most of its rows went, or,
    without rows, to the first cluster.
    """
    total = max(num, int(found.max()) + 1)
    clusters = np.arange(total, dtype=np.int32)
    order = np.lexsort((now, ids))
    bounds = np.searchsorted(ids[order], np.arange(num + 1))
    for gone in np.setdiff1d(np.arange(num), found):
        went = now[order[bounds[gone] : bounds[gone + 1]]]
        clusters[gone] = np.bincount(went).argmax() if len(went) else found.min()
    return clusters


def _rows(centers: Centers, embeddings: EmbeddingsArtifact) -> Embeddings:
    rows: Embeddings = centers.align(unit_rows(embeddings.load()))
    return rows


def _examples(
    embeddings: EmbeddingsArtifact,
    wanted: NDArray[np.bool_],
    clusters: NDArray[np.integer],
    distances: NDArray[np.float32],
    num: int,
) -> Examples:
    """Returns the nearest of the wanted rows for each of `num` clusters."""
    members = NearestMembers(num, NUM_EXAMPLES)
    numbers = np.flatnonzero(wanted)
    members.add(clusters[numbers], 1 - distances[numbers].astype(np.float64), numbers)
    present = members.rows >= 0
    keys = embeddings.keys_at(members.rows[present])
    return Examples.of(keys, present.sum(axis=1), members.scores[present].astype(np.float32))


def _check_id(state: LivingCenters, center: int) -> None:
    num = len(state.clusters)
    if not 0 <= center < num:
        raise InvalidInput(
            f"{center} is the id of no center", remedy=f"there are {num}: 0 to {num - 1}"
        )


_CHANGES: Final[dict[str, Callable[[LivingCenters, Step, Given], Changed]]] = {
    "update": _updated,
    "merge": _merged,
    "split": _divided,
    "align": _aligned,
}


def carry_levels(before: Artifact, after: Centers, draft: Draft) -> None:
    """Writes the levels of the centers `before`, where they have any, for those since.

    A center that stays keeps its path; a new one joins the nearest group of the finest coarser
    level, and the groups above it.
    """
    if LEVELS not in before.files:
        return
    table = pq.read_table(before.file(LEVELS))
    names = [name for name in table.column_names if name.startswith("of_")]
    known = [table[name].to_numpy() for name in names]
    centers = [read_level_centers(before, name) for name in names]
    joined, _ = nearest_with_distances(after.vectors[len(known[0]) :], centers[0])
    groups: list[NDArray[np.int32]] = []
    for level, group in enumerate(known):
        if level:
            parents = np.empty(len(centers[level - 1]), np.int32)
            parents[known[level - 1]] = group
            joined = parents[joined]
        groups.append(np.concatenate([group, joined]).astype(np.int32))
    write_levels(draft, after.sizes, groups, centers)
