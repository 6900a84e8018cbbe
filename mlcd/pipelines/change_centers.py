"""Changes of centers after they were clustered: new images arrive, clusters are merged or split.

Every change makes another artifact, whose journal tells the steps since the first. Ids stay: rows
of centers are added and never taken away. Given names go along.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.examples import Examples
from mlcd.artifacts.given_names import GIVEN_NAMES, current_names, write_given_names
from mlcd.artifacts.living_centers import LivingCenters
from mlcd.artifacts.manifest import Artifact, Parent, Request, open_artifact
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.members import NUM_EXAMPLES, NearestMembers
from mlcd.clustering.novelty import nearest, new_centers, own_quantiles
from mlcd.errors import ArtifactInvalid, ConfigInvalid, InvalidInput, NotFound
from mlcd.types import Embeddings, unit_rows

_LEAST: Final = 5  # images of a new cluster
_Given = Mapping[str, EmbeddingsArtifact]
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
    given = {added.artifact.digest: added}
    if np.isnan(LivingCenters.read(before).quantiles).any():
        members = members or _made_from(before)
        step["members"] = members.artifact.digest
        given[members.artifact.digest] = members
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
    return _made(before, step, {members.artifact.digest: members}, out)


def replay(path: Path, origin: Path, embeddings: list[EmbeddingsArtifact], out: Path) -> Artifact:
    """Makes the centers at `path` again, by the steps of their journal from the first centers on.

    Raises ArtifactInvalid where a step makes other centers than it made then, NotFound where the
    embeddings of a step are not given.
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
    given = {each.artifact.digest: each for each in embeddings}
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
    roles = [role for role in ("added", "members") if role in step]
    for role in roles:
        if step[role] not in given:
            raise NotFound(
                f"the embeddings of digest {step[role][:12]} are needed", remedy="give them, too"
            )
    parents = (
        before.as_parent_of(out, "centers"),
        *(given[step[role]].artifact.as_parent_of(out, role) for role in roles),
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
    centers, added = state.centers, given[step["added"]]
    num, quantiles = len(centers.vectors), state.quantiles
    if "members" in step:
        own, distances = nearest(_rows(centers, given[step["members"]]), centers.vectors)
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
    centers, center, members = state.centers, step["id"], given[step["members"]]
    _check_id(state, center)
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


_CHANGES: Final[
    dict[str, Callable[[LivingCenters, _Facts, _Given], tuple[LivingCenters, _Facts]]]
] = {"update": _updated, "merge": _merged, "split": _divided}


def _rows(centers: Any, embeddings: EmbeddingsArtifact) -> Embeddings:
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


def _check_fingerprint(centers: Artifact, embeddings: EmbeddingsArtifact) -> None:
    if centers.fingerprint != embeddings.fingerprint:
        raise ConfigInvalid(
            f"{centers.path} and {embeddings.artifact.path} are of two models",
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
