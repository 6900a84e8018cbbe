"""Changes of centers after they were clustered: new images arrive, clusters are merged or split.

Every change makes another artifact, whose journal tells the steps since the first. Ids stay: rows
of centers are added and never taken away. ArtifactsByDigest names go along.
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
from mlcd.pipelines.center_changes import ArtifactsByDigest, apply_step, carry_levels
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
    """Adds clusters for the embeddings at `new` that lie beyond the existing clusters.

    members: the embeddings that the centers at `path` were clustered from, for their quantiles;
    needed at the first update only, and by default found through the manifest. num_new: the number
    of new clusters; by default as many as give them the median size of the existing ones.
    """
    if not 0 < quantile < 1:
        raise ConfigInvalid(f"the quantile must lie between 0 and 1, got {quantile:g}")
    before, added = open_artifact(path, "centers"), open_artifact(new, "embeddings")
    step: dict[str, Any] = {
        "change": "update",
        "added": added.digest,
        "quantile": quantile,
        "new": num_new,
        "seed": seed,
    }
    artifacts = {added.digest: added}
    if np.isnan(LivingCenters.read(before).quantiles).any():
        compared = _members(before, members)
        step["members"] = compared.digest
        artifacts[compared.digest] = compared
    return _make(before, step, artifacts, out)


def merge(path: Path, ids: tuple[int, ...], out: Path) -> Artifact:
    """Joins clusters: their centers stay, and stand for one cluster, that of the lowest id."""
    return _make(open_artifact(path, "centers"), {"change": "merge", "ids": sorted(ids)}, {}, out)


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
    return _make(before, step, {compared.digest: compared}, out)


def align(
    path: Path,
    target: Path,
    out: Path,
    *,
    members: Path | None = None,
    quantile: float = 0.95,
) -> Artifact:
    """Gives the centers at `target`, clustered from scratch, the ids of the clusters at `path` with
    the same members.

    members: the rows that both are compared on, as for `update`. Clusters without a counterpart get
    new ids. An id without a counterpart stands for the cluster that most of its members went to.
    """
    before, to = open_artifact(path, "centers"), open_artifact(target, "centers")
    compared = _members(to, members)
    step = {
        "change": "align",
        "to": to.digest,
        "members": compared.digest,
        "quantile": quantile,
    }
    artifacts = {to.digest: to, compared.digest: compared}
    return _make(before, step, artifacts, out)


def replay(path: Path, origin: Path, using: Iterable[Path], out: Path) -> Artifact:
    """Makes the centers at `path` again, by the steps of their journal from the first centers on.

    using: the embeddings and centers that the steps used. Raises ArtifactInvalid where a step makes
    other centers than it made then, NotFound where one that it used is not given.
    """
    changed, first = open_artifact(path, "centers"), open_artifact(origin, "centers")
    journal = LivingCenters.read(changed).journal
    if not journal.steps:
        raise InvalidInput(
            f"a replay needs the journal of changed centers, found none in {path}",
            remedy="give centers that were changed",
        )
    if first.digest != journal.origin:
        raise ArtifactInvalid(
            f"{origin} is not where the journal of {path} begins",
            remedy=f"give the centers of digest {journal.origin[:12]}",
        )
    artifacts = {source.digest: source for source in map(open_artifact, using)}
    digests = (*journal.made, changed.digest)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        artifact = first
        for number, (step, digest) in enumerate(zip(journal.steps, digests, strict=True), start=1):
            place = out if number == len(digests) else Path(folder) / str(number)
            artifact = _make(artifact, step, artifacts, place)
            if artifact.digest != digest:
                raise ArtifactInvalid(
                    f"step {number} of the journal of {path} makes other centers now",
                    remedy="replay it with the version of mlcd that wrote it",
                )
    return artifact


def _make(
    before: Artifact, step: dict[str, Any], artifacts: ArtifactsByDigest, out: Path
) -> Artifact:
    """Applies one step and writes the result, with the names given so far."""
    roles = [role for role in ("added", "to", "members") if role in step]
    for role in roles:
        if step[role] not in artifacts:
            raise NotFound(
                f"a step used the artifact of digest {step[role][:12]}", remedy="give it, too"
            )
    parents = (
        before.as_parent_of(out, "centers"),
        *(artifacts[step[role]].as_parent_of(out, role) for role in roles),
    )
    request = Request("centers", step, parents, before.fingerprint)
    result = find_published(out, request)
    if result is None:
        state = LivingCenters.read(before)
        for role in roles:
            _check_fingerprint(before, artifacts[step[role]])
        after, facts = apply_step(state, step, artifacts)
        with Draft(out, request) as draft:
            # the names that are given later belong to no digest
            plain = replace(after.centers, names=None)
            journal = state.journal.then(before, step)
            replace(after, centers=plain, journal=journal).write(draft)
            carry_levels(before, plain, draft)
            result = draft.publish(summary={"clusters": len(np.unique(after.clusters)), **facts})
    if not (result.path / GIVEN_NAMES).exists():
        _carry_names(before, result)
    return result


def _carry_names(before: Artifact, after: Artifact) -> None:
    names_before = current_names(before)
    if not any(names_before.names):
        return
    num = len(np.load(after.file("sizes.npy"), mmap_mode="r", allow_pickle=False))
    names_after = names_before.names + (None,) * (num - len(names_before.names))
    # the evidence stays with the centers that it was found for
    write_given_names(after, replace(names_before, names=names_after, evidence=None))


def _members(centers: Artifact, members: Path | None) -> Artifact:
    return open_used_embeddings(centers, members, option="--members").artifact


def _check_fingerprint(centers: Artifact, embeddings: Artifact) -> None:
    if centers.fingerprint != embeddings.fingerprint:
        raise ConfigInvalid(
            f"{centers.path} and {embeddings.path} are of two models",
            remedy="embed the images with the model of the centers",
        )
