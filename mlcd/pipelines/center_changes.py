"""Changes to centers that keep the ids of clusters: each applies one step of a journal.

Nothing here depends on a clock or a path: the same step on the same rows gives the same centers.
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

_MIN_MEMBERS: Final = 5  # images of a new cluster
Step = Mapping[str, Any]
# the artifacts that a step uses, by digest
ArtifactsByDigest = Mapping[str, Artifact]
Changed = tuple[LivingCenters, dict[str, Any]]


def apply_step(state: LivingCenters, step: Step, artifacts: ArtifactsByDigest) -> Changed:
    """Returns the centers after one step, and facts about the step.

    Raises InvalidInput if the step cannot be applied.
    """
    return _CHANGES[step["change"]](state, step, artifacts)


def _update(state: LivingCenters, step: Step, artifacts: ArtifactsByDigest) -> Changed:
    centers, added = state.centers, EmbeddingsArtifact(artifacts[step["added"]])
    num, quantiles = len(centers.vectors), state.quantiles
    if "members" in step:
        members = EmbeddingsArtifact(artifacts[step["members"]])
        own, distances = nearest_with_distances(_aligned_rows(centers, members), centers.vectors)
        measured = own_quantiles(own, distances, num, step["quantile"])
        quantiles = np.where(np.isnan(quantiles), measured, quantiles)
    rows = _aligned_rows(centers, added)
    new_vectors, aside = new_centers(
        rows,
        centers.vectors,
        quantiles,
        typical=int(np.median(centers.sizes[centers.sizes > 0])),
        num=step["new"],
        least=_MIN_MEMBERS,
        seed=step["seed"],
    )
    vectors = np.concatenate([centers.vectors, new_vectors])
    now, distances = nearest_with_distances(rows, vectors)
    joined = now >= num
    sizes = np.bincount(now, minlength=len(vectors))
    sizes[:num] += centers.sizes
    examples = centers.examples
    if examples is not None and len(new_vectors):
        examples = examples.append(_examples(added, joined, now - num, distances, len(new_vectors)))
    if len(new_vectors):
        new = own_quantiles(
            now[joined] - num, distances[joined], len(new_vectors), step["quantile"]
        )
        quantiles = np.concatenate([quantiles, new])
    new_state = replace(
        state,
        centers=replace(
            centers, vectors=vectors, sizes=sizes, examples=examples, names=None, audit_rows=None
        ),
        quantiles=quantiles,
        clusters=np.concatenate([state.clusters, np.arange(num, len(vectors), dtype=np.int32)]),
    )
    facts = {
        "new": len(new_vectors),
        "images": len(rows),
        "aside": int(aside.sum()),
        "in_new": int(joined.sum()),
        "still_beyond": int((distances > quantiles[now]).sum()),
    }
    return new_state, facts


def _merge(state: LivingCenters, step: Step, _: ArtifactsByDigest) -> Changed:
    ids = step["ids"]
    if len(ids) < 2 or len(set(ids)) < len(ids):
        raise InvalidInput(
            f"a merge needs at least two different ids, got {ids}", remedy="name each cluster once"
        )
    for cluster in ids:
        _check_id(state, cluster)
    joined = np.isin(state.clusters, state.clusters[ids])
    clusters = np.where(joined, state.clusters[ids].min(), state.clusters).astype(np.int32)
    return replace(state, clusters=clusters), {"merged": len(ids)}


def _split(state: LivingCenters, step: Step, artifacts: ArtifactsByDigest) -> Changed:
    centers, center = state.centers, step["id"]
    _check_id(state, center)
    members = EmbeddingsArtifact(artifacts[step["members"]])
    rows = _aligned_rows(centers, members)
    own, _ = nearest_with_distances(rows, centers.vectors)
    inside = own == center
    result = kmeans([rows[inside]], 2, seed=step["seed"]) if inside.sum() > 1 else None
    if result is None or not result.sizes.all():
        raise InvalidInput(
            f"cluster {center} cannot be split: it needs two different images among the embeddings",
            remedy="give embeddings with more images of this cluster",
        )
    order = np.argsort(-result.sizes, kind="stable")
    first, second = result.centers[order]
    vectors = np.concatenate([centers.vectors, second[None]])
    vectors[center] = first
    sizes = np.append(centers.sizes, 0)
    # members that are not among these rows are assumed to divide in the same ratio
    sizes[-1] = round(sizes[center] * result.sizes[order[1]] / result.sizes.sum())
    sizes[center] -= sizes[-1]
    part, distances = nearest_with_distances(rows, np.stack([first, second]))
    parts = own_quantiles(part[inside], distances[inside], 2, step["quantile"])
    quantiles = np.append(state.quantiles, parts[1])
    quantiles[center] = parts[0]
    examples = centers.examples
    if examples is not None:
        first_examples, second_examples = (
            _examples(members, inside & (part == half), np.zeros_like(part), distances, 1)
            for half in (0, 1)
        )
        examples = examples.with_center(center, first_examples).append(second_examples)
    new_state = replace(
        state,
        centers=replace(
            centers, vectors=vectors, sizes=sizes, examples=examples, names=None, audit_rows=None
        ),
        quantiles=quantiles.astype(np.float32),
        clusters=np.append(state.clusters, np.int32(len(vectors) - 1)),
    )
    return new_state, {"new": 1, "images": int(inside.sum())}


def _align(state: LivingCenters, step: Step, artifacts: ArtifactsByDigest) -> Changed:
    centers, target = state.centers, LivingCenters.read(artifacts[step["to"]]).centers
    members = EmbeddingsArtifact(artifacts[step["members"]])
    ids, _ = nearest_with_distances(_aligned_rows(centers, members), centers.vectors)
    rows = _aligned_rows(target, members)
    now, distances = nearest_with_distances(rows, target.vectors)
    num, num_others = len(centers.vectors), len(target.vectors)
    own = state.clusters[ids]
    ids_now = matched(own, now, (num, num_others))
    unmatched = np.flatnonzero(ids_now < 0)
    ids_now[unmatched] = num + np.arange(len(unmatched))
    clusters = _map_ids(ids, ids_now[now], num, ids_now)
    vectors = np.empty((len(clusters), target.vectors.shape[1]), np.float32)
    vectors[ids_now] = target.vectors
    # ids without a counterpart get the center of the cluster that they map to
    vectors = vectors[clusters]
    sizes = np.zeros(len(clusters), np.int64)
    sizes[ids_now] = target.sizes
    examples = None
    if target.examples is not None:
        examples = _examples(
            members, np.ones(len(rows), np.bool_), ids_now[now], distances, len(clusters)
        )
    quantiles = own_quantiles(ids_now[now], distances, len(clusters), step["quantile"])
    new_state = replace(
        state,
        centers=replace(target, vectors=vectors, sizes=sizes, examples=examples, names=None),
        quantiles=quantiles[clusters],
        clusters=clusters,
    )
    facts = {
        "kept": num_others - len(unmatched),
        "new": len(unmatched),
        "images": len(rows),
        "stay": float((ids_now[now] == own).mean()),
    }
    return new_state, facts


def _map_ids(
    ids: NDArray[np.int32], now: NDArray[np.int64], num: int, ids_now: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Returns the cluster of each id after an alignment, [total].

    ids: id of each row before. now: new cluster of each row. num: number of ids before. ids_now: id
    of each new cluster. An id that no new cluster has maps to the cluster that most of its rows
    are in now; without rows, to the cluster of the lowest id.
    """
    total = max(num, int(ids_now.max()) + 1)
    clusters = np.arange(total, dtype=np.int32)
    order = np.lexsort((now, ids))
    bounds = np.searchsorted(ids[order], np.arange(num + 1))
    for dropped in np.setdiff1d(np.arange(num), ids_now):
        targets = now[order[bounds[dropped] : bounds[dropped + 1]]]
        clusters[dropped] = np.bincount(targets).argmax() if len(targets) else ids_now.min()
    return clusters


def _aligned_rows(centers: Centers, embeddings: EmbeddingsArtifact) -> Embeddings:
    rows: Embeddings = centers.align(unit_rows(embeddings.load()))
    return rows


def _examples(
    embeddings: EmbeddingsArtifact,
    is_wanted: NDArray[np.bool_],
    clusters: NDArray[np.integer],
    distances: NDArray[np.float32],
    num: int,
) -> Examples:
    """Returns the keys of the rows nearest to each of `num` clusters, among rows of `is_wanted`."""
    members = NearestMembers(num, NUM_EXAMPLES)
    row_ids = np.flatnonzero(is_wanted)
    members.add(clusters[row_ids], 1 - distances[row_ids].astype(np.float64), row_ids)
    present = members.rows >= 0
    keys = embeddings.keys_at(members.rows[present])
    return Examples.of(keys, present.sum(axis=1), members.scores[present].astype(np.float32))


def _check_id(state: LivingCenters, center: int) -> None:
    num = len(state.clusters)
    if not 0 <= center < num:
        raise InvalidInput(
            f"the id of a center must be in 0 to {num - 1}, got {center}",
            remedy="give the id of an existing center",
        )


_CHANGES: Final[dict[str, Callable[[LivingCenters, Step, ArtifactsByDigest], Changed]]] = {
    "update": _update,
    "merge": _merge,
    "split": _split,
    "align": _align,
}


def carry_levels(before: Artifact, after: Centers, draft: Draft) -> None:
    """Writes the coarser levels of the centers `before`, if any, extended to the centers `after`.

    Existing centers keep their groups. A new center joins the nearest group of the finest of these
    levels, and the groups that contain it.
    """
    if LEVELS not in before.files:
        return
    table = pq.read_table(before.file(LEVELS))
    names = [name for name in table.column_names if name.startswith("of_")]
    groups_before = [table[name].to_numpy() for name in names]
    centers = [read_level_centers(before, name) for name in names]
    joined, _ = nearest_with_distances(after.vectors[len(groups_before[0]) :], centers[0])
    groups: list[NDArray[np.int32]] = []
    for level, group in enumerate(groups_before):
        if level:
            parents = np.empty(len(centers[level - 1]), np.int32)
            parents[groups_before[level - 1]] = group
            joined = parents[joined]
        groups.append(np.concatenate([group, joined]).astype(np.int32))
    write_levels(draft, after.sizes, groups, centers)
