"""Changes of centers after they were clustered: new images arrive, clusters are merged or split.

Every change makes another artifact, whose journal tells the steps since the first. Ids stay: rows
of centers are added and never taken away. Given names go along.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.given_names import GIVEN_NAMES, current_names, write_given_names
from mlcd.artifacts.living_centers import LivingCenters
from mlcd.artifacts.manifest import Artifact, Request, open_artifact
from mlcd.errors import ArtifactInvalid, ConfigInvalid, InvalidInput, NotFound
from mlcd.pipelines.center_changes import Given, carry_levels, changed
from mlcd.pipelines.used_embeddings import open_used_embeddings


def update(
    path: Path,
    new: Path,
    out: Path,
    *,
    members: Path | None = None,
    quantile: float = 0.95,
    num_new: int | None = None,
    seed: int = 0,
) -> Artifact:
    """Adds new clusters for those of the embeddings at `new` that lie beyond the old ones.

    members: what the centers at `path` were clustered from, for their quantiles; it is found where
    they were made from it. It is needed at the first update alone. num_new: how many clusters are
    looked for; by default as many as have the old ones' median size.
    """
    if not 0 < quantile < 1:
        raise ConfigInvalid(f"{quantile:g} is no quantile", remedy="give one between 0 and 1")
    before, added = open_artifact(path, "centers"), open_artifact(new, "embeddings")
    step: dict[str, Any] = {
        "change": "update",
        "added": added.digest,
        "quantile": quantile,
        "new": num_new,
        "seed": seed,
    }
    given = {added.digest: added}
    if np.isnan(LivingCenters.read(before).quantiles).any():
        compared = _members(before, members)
        step["members"] = compared.digest
        given[compared.digest] = compared
    return _made(before, step, given, out)


def merge(path: Path, ids: tuple[int, ...], out: Path) -> Artifact:
    """Joins clusters: their centers stay, and stand for one cluster, that of the lowest id."""
    return _made(open_artifact(path, "centers"), {"change": "merge", "ids": sorted(ids)}, {}, out)


def split(
    path: Path,
    center: int,
    out: Path,
    *,
    members: Path | None = None,
    quantile: float = 0.95,
    seed: int = 0,
) -> Artifact:
    """Divides the cluster of a center in two: the larger part keeps the id, the other gets a new
    one.

    members: rows of that cluster among others, as for `update`.
    """
    before = open_artifact(path, "centers")
    compared = _members(before, members)
    step = {
        "change": "split",
        "id": center,
        "members": compared.digest,
        "quantile": quantile,
        "seed": seed,
    }
    return _made(before, step, {compared.digest: compared}, out)


def align(
    path: Path,
    other: Path,
    out: Path,
    *,
    members: Path | None = None,
    quantile: float = 0.95,
) -> Artifact:
    """Gives the centers at `other`, of a clustering from scratch, the ids of the clusters at `path`
    whose members they have.

    members: the rows that both are compared on, as for `update`. Clusters without a counterpart get
    new ids. An id without one stays too, and stands for the cluster that most of its members went
    to.
    """
    before, to = open_artifact(path, "centers"), open_artifact(other, "centers")
    compared = _members(to, members)
    step = {
        "change": "align",
        "to": to.digest,
        "members": compared.digest,
        "quantile": quantile,
    }
    given = {to.digest: to, compared.digest: compared}
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


def _made(before: Artifact, step: dict[str, Any], given: Given, out: Path) -> Artifact:
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
        after, facts = changed(state, step, given)
        with Draft(out, request) as draft:
            # the names that are given later belong to no digest
            plain = replace(after.centers, names=None)
            journal = state.journal.then(before, step)
            replace(after, centers=plain, journal=journal).write(draft)
            carry_levels(before, plain, draft)
            made = draft.publish(summary={"clusters": len(np.unique(after.clusters)), **facts})
    if not (made.path / GIVEN_NAMES).exists():
        _carry_names(before, made)
    return made


def _carry_names(before: Artifact, made: Artifact) -> None:
    given = current_names(before)
    if not any(given.names):
        return
    num = len(np.load(made.file("sizes.npy"), mmap_mode="r", allow_pickle=False))
    names = given.names + (None,) * (num - len(given.names))
    # the evidence stays with the centers that it was found for
    write_given_names(made, replace(given, names=names, evidence=None))


def _members(centers: Artifact, given: Path | None) -> Artifact:
    return open_used_embeddings(centers, given, option="--members").artifact


def _check_fingerprint(centers: Artifact, other: Artifact) -> None:
    if centers.fingerprint != other.fingerprint:
        raise ConfigInvalid(
            f"{centers.path} and {other.path} are of two models",
            remedy="embed the images with the model of the centers",
        )
