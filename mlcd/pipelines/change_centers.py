"""Changes of centers after they were clustered: new images arrive, clusters are merged or split.

Every change makes another artifact, whose journal tells the steps since the first. Ids stay: rows
of centers are added and never taken away. Given names go along.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.examples import Examples
from mlcd.artifacts.given_names import GIVEN_NAMES, current_names, write_given_names
from mlcd.artifacts.living_centers import LivingCenters
from mlcd.artifacts.manifest import Artifact, Parent, Request, open_artifact
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.members import NUM_EXAMPLES, NearestMembers
from mlcd.clustering.novelty import matched, nearest, new_centers, own_quantiles
from mlcd.errors import ArtifactInvalid, ConfigInvalid, InvalidInput, NotFound
from mlcd.types import Embeddings, unit_rows

_LEAST: Final = 5  # images of a new cluster
_Given = Mapping[str, Artifact]
_Facts = dict[str, Any]


def update(
    path: Path,
    added: EmbeddingsArtifact,
    out: Path,
    *,
    members: EmbeddingsArtifact | None = None,
    quantile: float = 0.95,
    num_new: int | None = None,
    seed: int = 0,
) -> Artifact:
    """Adds new clusters for those of the `added` rows that lie beyond the old ones.

    members: what the centers at `path` were clustered from, for their quantiles; it is found where
    they were made from it. It is needed at the first update alone. num_new: how many clusters are
    looked for; by default as many as have the old ones' median size.
    """
    if not 0 < quantile < 1:
        raise ConfigInvalid(f"{quantile:g} is no quantile", remedy="give one between 0 and 1")
    before = open_artifact(path, "centers")
    step: _Facts = {
        "change": "update",
        "added": added.artifact.digest,
        "quantile": quantile,
        "new": num_new,
        "seed": seed,
    }
    given = {added.artifact.digest: added.artifact}
    if np.isnan(LivingCenters.read(before).quantiles).any():
        members = members or _made_from(before)
        step["members"] = members.artifact.digest
        given[members.artifact.digest] = members.artifact
    return _made(before, step, given, out)


def merge(path: Path, ids: tuple[int, ...], out: Path) -> Artifact:
    """Joins clusters: their centers stay, and stand for one cluster, that of the lowest id."""
    return _made(open_artifact(path, "centers"), {"change": "merge", "ids": sorted(ids)}, {}, out)


def split(
    path: Path,
    center: int,
    out: Path,
    *,
    members: EmbeddingsArtifact | None = None,
    quantile: float = 0.95,
    seed: int = 0,
) -> Artifact:
    """Divides the cluster of a center in two: the larger part keeps the id, the other gets a new
    one.

    members: rows of that cluster among others, as for `update`.
    """
    before = open_artifact(path, "centers")
    members = members or _made_from(before)
    step = {
        "change": "split",
        "id": center,
        "members": members.artifact.digest,
        "quantile": quantile,
        "seed": seed,
    }
    return _made(before, step, {members.artifact.digest: members.artifact}, out)


def align(
    path: Path,
    other: Path,
    out: Path,
    *,
    members: EmbeddingsArtifact | None = None,
    quantile: float = 0.95,
) -> Artifact:
    """Gives the centers at `other`, of a clustering from scratch, the ids of the clusters at `path`
    whose members they have.

    members: the rows that both are compared on, as for `update`. Clusters without a counterpart get
    new ids. An id without one stays too, and stands for the cluster that most of its members went
    to.
    """
    before, to = open_artifact(path, "centers"), open_artifact(other, "centers")
    members = members or _made_from(to)
    step = {
        "change": "align",
        "to": to.digest,
        "members": members.artifact.digest,
        "quantile": quantile,
    }
    given = {to.digest: to, members.artifact.digest: members.artifact}
    return _made(before, step, given, out)


def replay(path: Path, origin: Path, using: Iterable[Path], out: Path) -> Artifact:
    """Makes the centers at `path` again, by the steps of their journal from the first centers on.

    using: the embeddings and centers that the steps used. Raises ArtifactInvalid where a step makes
    other centers than it made then, NotFound where one that it used is not given.
    """
    wanted, first = open_artifact(path, "centers"), open_artifact(origin, "centers")
    journal = LivingCenters.read(wanted).journal
    if not journal.steps:
        raise InvalidInput(f"{path} has no journal", remedy="give centers that were changed")
    if first.digest != journal.origin:
        raise ArtifactInvalid(
            f"{origin} is not where the journal of {path} begins",
            remedy=f"give the centers of digest {journal.origin[:12]}",
        )
    given = {each.digest: each for each in map(open_artifact, using)}
    digests = (*journal.made, wanted.digest)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        artifact = first
        for number, (step, digest) in enumerate(zip(journal.steps, digests, strict=True), start=1):
            place = out if number == len(digests) else Path(folder) / str(number)
            artifact = _made(artifact, step, given, place)
            if artifact.digest != digest:
                raise ArtifactInvalid(
                    f"step {number} of the journal of {path} makes other centers now",
                    remedy="replay it with the version of mlcd that wrote it",
                )
    return artifact


def _made(before: Artifact, step: _Facts, given: _Given, out: Path) -> Artifact:
    """Applies one step and writes the result, with the names given so far."""
    roles = [role for role in ("added", "to", "members") if role in step]
    for role in roles:
        if step[role] not in given:
            raise NotFound(
                f"a step used the artifact of digest {step[role][:12]}", remedy="give it, too"
            )
    parents = (
        before.as_parent_of(out, "centers"),
        *(given[step[role]].as_parent_of(out, role) for role in roles),
    )
    request = Request("centers", step, parents, before.fingerprint)
    made = find_published(out, request)
    if made is None:
        state = LivingCenters.read(before)
        for role in roles:
            _check_fingerprint(before, given[step[role]])
        changed, facts = _CHANGES[step["change"]](state, step, given)
        with Draft(out, request) as draft:
            # the names that are given later belong to no digest
            plain = replace(changed.centers, names=None)
            journal = state.journal.then(before, step)
            replace(changed, centers=plain, journal=journal).write(draft)
            made = draft.publish(summary={"clusters": _num_clusters(changed), **facts})
    if not (made.path / GIVEN_NAMES).exists():
        _carry_names(before, made)
    return made


def _updated(state: LivingCenters, step: _Facts, given: _Given) -> tuple[LivingCenters, _Facts]:
    centers, added = state.centers, EmbeddingsArtifact(given[step["added"]])
    num, quantiles = len(centers.vectors), state.quantiles
    if "members" in step:
        members = EmbeddingsArtifact(given[step["members"]])
        own, distances = nearest(_rows(centers, members), centers.vectors)
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
    now, distances = nearest(rows, vectors)
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


def _merged(state: LivingCenters, step: _Facts, _: _Given) -> tuple[LivingCenters, _Facts]:
    ids = step["ids"]
    if len(ids) < 2 or len(set(ids)) < len(ids):
        raise InvalidInput("that is nothing to merge", remedy="give two ids or more")
    for each in ids:
        _check_id(state, each)
    joined = np.isin(state.clusters, state.clusters[ids])
    clusters = np.where(joined, state.clusters[ids].min(), state.clusters).astype(np.int32)
    return replace(state, clusters=clusters), {"merged": len(ids)}


def _divided(state: LivingCenters, step: _Facts, given: _Given) -> tuple[LivingCenters, _Facts]:
    centers, center = state.centers, step["id"]
    _check_id(state, center)
    members = EmbeddingsArtifact(given[step["members"]])
    rows = _rows(centers, members)
    own, _ = nearest(rows, centers.vectors)
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
    part, distances = nearest(rows, np.stack([first, second]))
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


def _aligned(state: LivingCenters, step: _Facts, given: _Given) -> tuple[LivingCenters, _Facts]:
    centers, others = state.centers, Centers.read(given[step["to"]])
    members = EmbeddingsArtifact(given[step["members"]])
    ids, _ = nearest(_rows(centers, members), centers.vectors)
    rows = _rows(others, members)
    now, distances = nearest(rows, others.vectors)
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


_CHANGES: Final[
    dict[str, Callable[[LivingCenters, _Facts, _Given], tuple[LivingCenters, _Facts]]]
] = {"update": _updated, "merge": _merged, "split": _divided, "align": _aligned}


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


def _carry_names(before: Artifact, made: Artifact) -> None:
    given = current_names(before)
    if not any(given.names):
        return
    num = len(np.load(made.file("sizes.npy"), mmap_mode="r", allow_pickle=False))
    names = given.names + (None,) * (num - len(given.names))
    # the evidence stays with the centers that it was found for
    write_given_names(made, replace(given, names=names, evidence=None))


def _made_from(centers: Artifact) -> EmbeddingsArtifact:
    parent: Parent | None = next((p for p in centers.parents if p.role == "embeddings"), None)
    path = None if parent is None else centers.path.resolve() / parent.path
    if path is None or not path.is_dir():
        raise NotFound(
            f"the embeddings that {centers.path} was made from are not where they were",
            remedy="give --members",
        )
    return EmbeddingsArtifact.open(path.resolve())


def _check_fingerprint(centers: Artifact, other: Artifact) -> None:
    if centers.fingerprint != other.fingerprint:
        raise ConfigInvalid(
            f"{centers.path} and {other.path} are of two models",
            remedy="embed the images with the model of the centers",
        )


def _check_id(state: LivingCenters, center: int) -> None:
    num = len(state.clusters)
    if not 0 <= center < num:
        raise InvalidInput(
            f"{center} is the id of no center", remedy=f"there are {num}: 0 to {num - 1}"
        )


def _num_clusters(state: LivingCenters) -> int:
    return len(np.unique(state.clusters))
