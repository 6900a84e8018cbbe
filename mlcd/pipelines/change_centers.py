"""Changes centers after clustering: adds clusters for new images, merges, splits and aligns.

Every change writes a new artifact, whose journal lists the steps since the first artifact. Ids are
stable: rows of centers are added, never removed. Names given by users are carried over.
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

    members: embeddings that the centers at `path` were clustered from, to measure their quantiles;
    needed at the first update only; found through the manifest by default. num_new: number of new
    clusters; by default chosen so that each has about the median size of the existing clusters.
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
        compared = _open_members(before, members)
        step["members"] = compared.digest
        artifacts[compared.digest] = compared
    return _apply(before, step, artifacts, out)


def merge(path: Path, ids: tuple[int, ...], out: Path) -> Artifact:
    """Merges clusters: all their centers stay, and now represent the cluster of the lowest id."""
    return _apply(open_artifact(path, "centers"), {"change": "merge", "ids": sorted(ids)}, {}, out)


def split(
    path: Path,
    center: int,
    out: Path,
    *,
    members: Path | None = None,
    quantile: float = 0.95,
    seed: int = 0,
) -> Artifact:
    """Splits a cluster in two: the larger part keeps its id, the smaller part gets a new id.

    members: embeddings that include rows of the cluster; found as for `update` by default.
    """
    before = open_artifact(path, "centers")
    compared = _open_members(before, members)
    step = {
        "change": "split",
        "id": center,
        "members": compared.digest,
        "quantile": quantile,
        "seed": seed,
    }
    return _apply(before, step, {compared.digest: compared}, out)


def align(
    path: Path,
    target: Path,
    out: Path,
    *,
    members: Path | None = None,
    quantile: float = 0.95,
) -> Artifact:
    """Gives the centers at `target`, clustered from scratch, the ids of the clusters at `path` that
    they match: that share more than half of the rows of either cluster.

    members: rows to compare both on; by default those that `target` was clustered from. Unmatched
    clusters get new ids. An unmatched id refers to the cluster that most of its members are in now.
    """
    before, to = open_artifact(path, "centers"), open_artifact(target, "centers")
    compared = _open_members(to, members)
    step = {
        "change": "align",
        "to": to.digest,
        "members": compared.digest,
        "quantile": quantile,
    }
    artifacts = {to.digest: to, compared.digest: compared}
    return _apply(before, step, artifacts, out)


def replay(path: Path, origin: Path, using: Iterable[Path], out: Path) -> Artifact:
    """Rebuilds the centers at `path` by applying the steps of their journal to `origin`.

    using: the embeddings and centers that the steps used. Raises ArtifactInvalid if a step gives
    other centers than before, NotFound if an artifact that a step used is missing in `using`.
    """
    changed, first_centers = open_artifact(path, "centers"), open_artifact(origin, "centers")
    journal = LivingCenters.read(changed).journal
    if not journal.steps:
        raise InvalidInput(
            f"a replay needs the journal of changed centers, found none in {path}",
            remedy="give centers that were changed",
        )
    if first_centers.digest != journal.origin:
        raise ArtifactInvalid(
            f"the journal of {path} starts from other centers than {origin}",
            remedy=f"give the centers of digest {journal.origin[:12]}",
        )
    artifacts = {source.digest: source for source in map(open_artifact, using)}
    digests = (*journal.made, changed.digest)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        artifact = first_centers
        for number, (step, digest) in enumerate(zip(journal.steps, digests, strict=True), start=1):
            place = out if number == len(digests) else Path(folder) / str(number)
            artifact = _apply(artifact, step, artifacts, place)
            if artifact.digest != digest:
                raise ArtifactInvalid(
                    f"step {number} of the journal of {path} gives other centers than before",
                    remedy="replay it with the version of mlcd that wrote it",
                )
    return artifact


def _apply(
    before: Artifact, step: dict[str, Any], artifacts: ArtifactsByDigest, out: Path
) -> Artifact:
    """Applies one step and writes the result, with the names that users gave so far."""
    roles = [role for role in ("added", "to", "members") if role in step]
    for role in roles:
        if step[role] not in artifacts:
            raise NotFound(
                f"a step used the artifact of digest {step[role][:12]}, which was not given",
                remedy="give that artifact, too",
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
            # names that users give are no part of an artifact's digest
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
    # the evidence stays with the centers that it describes
    write_given_names(after, replace(names_before, names=names_after, evidence=None))


def _open_members(centers: Artifact, members: Path | None) -> Artifact:
    return open_used_embeddings(centers, members, option="--members").artifact


def _check_fingerprint(centers: Artifact, embeddings: Artifact) -> None:
    if centers.fingerprint != embeddings.fingerprint:
        raise ConfigInvalid(
            f"{centers.path} and {embeddings.path} must be of the same model",
            remedy="embed the images with the model of the centers",
        )
