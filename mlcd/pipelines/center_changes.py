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
        center_ids, distances = nearest_with_distances(
            _aligned_rows(centers, members), centers.vectors
        )
        measured = own_quantiles(center_ids, distances, num, step["quantile"])
        quantiles = np.where(np.isnan(quantiles), measured, quantiles)
    rows = _aligned_rows(centers, added)
    new_vectors, is_far = new_centers(
        rows,
        centers.vectors,
        quantiles,
        typical=int(np.median(centers.sizes[centers.sizes > 0])),
        num=step["new"],
        least=_MIN_MEMBERS,
        seed=step["seed"],
    )
    vectors = np.concatenate([centers.vectors, new_vectors])
    nearest_ids, distances = nearest_with_distances(rows, vectors)
    is_new = nearest_ids >= num
    sizes = np.bincount(nearest_ids, minlength=len(vectors))
    sizes[:num] += centers.sizes
    examples = centers.examples
    if examples is not None and len(new_vectors):
        examples = examples.append(
            _find_examples(added, is_new, nearest_ids - num, distances, len(new_vectors))
        )
    if len(new_vectors):
        new_quantiles = own_quantiles(
            nearest_ids[is_new] - num, distances[is_new], len(new_vectors), step["quantile"]
        )
        quantiles = np.concatenate([quantiles, new_quantiles])
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
        "aside": int(is_far.sum()),
        "in_new": int(is_new.sum()),
        "still_beyond": int((distances > quantiles[nearest_ids]).sum()),
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
    is_merged = np.isin(state.clusters, state.clusters[ids])
    clusters = np.where(is_merged, state.clusters[ids].min(), state.clusters).astype(np.int32)
    return replace(state, clusters=clusters), {"merged": len(ids)}


def _split(state: LivingCenters, step: Step, artifacts: ArtifactsByDigest) -> Changed:
    centers, center = state.centers, step["id"]
    _check_id(state, center)
    members = EmbeddingsArtifact(artifacts[step["members"]])
    rows = _aligned_rows(centers, members)
    center_ids, _ = nearest_with_distances(rows, centers.vectors)
    is_member = center_ids == center
    result = kmeans([rows[is_member]], 2, seed=step["seed"]) if is_member.sum() > 1 else None
    if result is None or not result.sizes.all():
        raise InvalidInput(
            f"cluster {center} cannot be split: it needs two different images among the embeddings",
            remedy="give embeddings with more images of this cluster",
        )
    order = np.argsort(-result.sizes, kind="stable")
    larger, smaller = result.centers[order]
    vectors = np.concatenate([centers.vectors, smaller[None]])
    vectors[center] = larger
    sizes = np.append(centers.sizes, 0)
    # members that are not among these rows are assumed to divide in the same ratio
    sizes[-1] = round(sizes[center] * result.sizes[order[1]] / result.sizes.sum())
    sizes[center] -= sizes[-1]
    half_ids, distances = nearest_with_distances(rows, np.stack([larger, smaller]))
    half_quantiles = own_quantiles(half_ids[is_member], distances[is_member], 2, step["quantile"])
    quantiles = np.append(state.quantiles, half_quantiles[1])
    quantiles[center] = half_quantiles[0]
    examples = centers.examples
    if examples is not None:
        larger_examples, smaller_examples = (
            _find_examples(
                members, is_member & (half_ids == half), np.zeros_like(half_ids), distances, 1
            )
            for half in (0, 1)
        )
        examples = examples.with_center(center, larger_examples).append(smaller_examples)
    new_state = replace(
        state,
        centers=replace(
            centers, vectors=vectors, sizes=sizes, examples=examples, names=None, audit_rows=None
        ),
        quantiles=quantiles.astype(np.float32),
        clusters=np.append(state.clusters, np.int32(len(vectors) - 1)),
    )
    return new_state, {"new": 1, "images": int(is_member.sum())}


def _align(state: LivingCenters, step: Step, artifacts: ArtifactsByDigest) -> Changed:
    centers, target = state.centers, LivingCenters.read(artifacts[step["to"]]).centers
    members = EmbeddingsArtifact(artifacts[step["members"]])
    old_ids, _ = nearest_with_distances(_aligned_rows(centers, members), centers.vectors)
    rows = _aligned_rows(target, members)
    target_ids, distances = nearest_with_distances(rows, target.vectors)
    num_old, num_new = len(centers.vectors), len(target.vectors)
    old_clusters = state.clusters[old_ids]
    new_ids = matched(old_clusters, target_ids, (num_old, num_new))
    unmatched = np.flatnonzero(new_ids < 0)
    new_ids[unmatched] = num_old + np.arange(len(unmatched))
    clusters = _map_ids(old_ids, new_ids[target_ids], num_old, new_ids)
    vectors = np.empty((len(clusters), target.vectors.shape[1]), np.float32)
    vectors[new_ids] = target.vectors
    # ids without a counterpart get the center of the cluster that they map to
    vectors = vectors[clusters]
    sizes = np.zeros(len(clusters), np.int64)
    sizes[new_ids] = target.sizes
    examples = None
    if target.examples is not None:
        examples = _find_examples(
            members, np.ones(len(rows), np.bool_), new_ids[target_ids], distances, len(clusters)
        )
    quantiles = own_quantiles(new_ids[target_ids], distances, len(clusters), step["quantile"])
    new_state = replace(
        state,
        centers=replace(target, vectors=vectors, sizes=sizes, examples=examples, names=None),
        quantiles=quantiles[clusters],
        clusters=clusters,
    )
    facts = {
        "kept": num_new - len(unmatched),
        "new": len(unmatched),
        "images": len(rows),
        "stay": float((new_ids[target_ids] == old_clusters).mean()),
    }
    return new_state, facts


def _map_ids(
    old_ids: NDArray[np.int32],
    new_clusters: NDArray[np.int64],
    num_old: int,
    cluster_ids: NDArray[np.int64],
) -> NDArray[np.int32]:
    """Returns the cluster of each id after an alignment, [total].

    old_ids, new_clusters: old id and new cluster of each row. num_old: number of old ids.
    cluster_ids: id of each new cluster. An old id that no new cluster has maps to the new cluster
    of most of its rows; without rows, to the new cluster of the lowest id.
    """
    total = max(num_old, int(cluster_ids.max()) + 1)
    clusters = np.arange(total, dtype=np.int32)
    order = np.lexsort((new_clusters, old_ids))
    bounds = np.searchsorted(old_ids[order], np.arange(num_old + 1))
    for dropped in np.setdiff1d(np.arange(num_old), cluster_ids):
        targets = new_clusters[order[bounds[dropped] : bounds[dropped + 1]]]
        clusters[dropped] = np.bincount(targets).argmax() if len(targets) else cluster_ids.min()
    return clusters


def _aligned_rows(centers: Centers, embeddings: EmbeddingsArtifact) -> Embeddings:
    rows: Embeddings = centers.align(unit_rows(embeddings.load()))
    return rows


def _find_examples(
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
