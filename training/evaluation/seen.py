"""Finds the images that a run was trained on, or that its centers were clustered from.

Images are identified by SHA-256, not by key: the same file has another key in another folder.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mlcd.artifacts.addition import state_with_digest
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.labels import DIGEST_BYTES
from mlcd.artifacts.manifest import Artifact, Parent, open_artifact
from mlcd.errors import InvalidInput, MlcdError, NotFound
from mlcd.models.runs import parent_path
from mlcd.pipelines.cluster import ClusterOptions, rows_to_cluster
from mlcd.training.config import RunConfig, is_pairs_recipe
from mlcd.training.data.dataset import open_dataset
from mlcd.training.evaluation.representations import digest_rows
from mlcd.training.pairs.pairs_config import PairsConfig
from mlcd.training.pairs.pairs_dataset import match_embeddings, open_pairs
from mlcd.training.recipe import build_config
from mlcd.training.run.run_files import read_run_config, read_run_fields
from mlcd.types import SampleKey

_MAX_DIGESTED: Final = 1 << 20  # largest number of captioned images to read and hash
_Digests = NDArray[np.uint8]


@dataclass(frozen=True)
class Seen:
    """The images that a run has seen.

    trained, clustered: uint8 [n, 32], SHA-256 of images. unknown: data that could not be looked up,
    with the reason.
    """

    trained: _Digests
    clustered: _Digests
    unknown: tuple[str, ...] = ()

    def among(self, tested: _Digests) -> "SeenAmong":
        """Returns which of the tested images, SHA-256 uint8 [N, 32], were seen."""
        return SeenAmong(
            _contains(tested, self.trained), _contains(tested, self.clustered), self.unknown
        )


@dataclass(frozen=True)
class SeenAmong:
    """The tested images that were seen; trained, clustered: bool [N]."""

    trained: NDArray[np.bool_]
    clustered: NDArray[np.bool_]
    unknown: tuple[str, ...]

    @property
    def any(self) -> NDArray[np.bool_]:
        return self.trained | self.clustered

    def facts(self) -> dict[str, Any]:
        return {
            "images": int(self.any.sum()),
            "trained_on": int(self.trained.sum()),
            "clustered": int(self.clustered.sum()),
            "unknown": list(self.unknown),
        }


def find_seen(artifact: Artifact) -> Seen:
    """Returns the images that a checkpoint, or the checkpoint of an exported model, has seen.

    Includes the images seen by the weights that training started from. A checkpoint of step 0 has
    seen no images of its own run.
    """
    no_digests = digest_rows([])
    is_trained = artifact.kind == "checkpoint" and artifact.config.get("step") != 0
    seen_in_run = _find_seen_in_run(artifact) if is_trained else Seen(no_digests, no_digests)
    return _join_seen([seen_in_run, *_find_seen_before(artifact)])


def check_seen(
    overlap: SeenAmong, keys: Sequence[SampleKey], path: Path, *, may_be_seen: bool
) -> SeenAmong:
    """Returns `overlap`. Raises InvalidInput naming a seen image, unless may_be_seen.

    keys: of the tested images. path: of the artifact that is tested.
    """
    if may_be_seen or not overlap.any.any():
        return overlap
    facts = overlap.facts()
    raise InvalidInput(
        f"{facts['images']} of {len(keys)} test images were used to make {path}: "
        f"{facts['trained_on']} trained on, {facts['clustered']} clustered, such as "
        f"{keys[int(np.flatnonzero(overlap.any)[0])]}",
        remedy="test on other images, hold them out of `mlcd cluster` and `mlcd train`, or "
        "allow and count them with --seen",
    )


def are_clusters_clean(run: Artifact, share: float) -> bool:
    """Returns True if the clusters of a run's labels were made without its held-out images.

    Also True without clusters, or if they cannot be looked up. share: the run's
    data.hold_out.
    """
    try:
        return all(centers.config.get("hold_out", share) >= share for centers in _open_centers(run))
    except MlcdError:
        return True


def _join_seen(sources: list[Seen]) -> Seen:
    return Seen(
        np.concatenate([source.trained for source in sources]),
        np.concatenate([source.clustered for source in sources]),
        tuple(reason for source in sources for reason in source.unknown),
    )


def _find_seen_before(artifact: Artifact) -> Iterator[Seen]:
    """Yields what the parents of a checkpoint or model artifact had seen."""
    no_digests = digest_rows([])
    for parent in artifact.parents:
        if parent.role == "weights":
            unknown = f"what the weights {PurePosixPath(parent.path).name} were trained on"
            yield Seen(no_digests, no_digests, (unknown,))
        elif parent.role == "images" and artifact.kind == "model":
            reason = f"the images {PurePosixPath(parent.path).name} that its towers were joined on"
            yield Seen(no_digests, no_digests, (reason,))
        elif parent.role in ("start", "text", "checkpoint", "model"):
            try:
                source = _open_parent(artifact, parent)
            except MlcdError as error:
                yield Seen(no_digests, no_digests, (f"what it started from: {error.message}",))
            else:
                yield find_seen(source)


def _find_seen_in_run(checkpoint: Artifact) -> Seen:
    no_digests = digest_rows([])
    unknown: list[str] = []
    trained = clustered = no_digests
    try:
        trained = _find_trained(checkpoint)
    except MlcdError as error:
        unknown.append(f"what it was trained on: {error.message}")
    try:
        clustered = np.concatenate([no_digests, *map(_digest_clustered, _open_centers(checkpoint))])
    except MlcdError as error:
        unknown.append(f"what its centers were made from: {error.message}")
    return Seen(trained, clustered, tuple(unknown))


def _find_trained(checkpoint: Artifact) -> _Digests:
    """Returns the digests of a run's training images, from its data at their current paths.

    Raises NotFound if the data has changed, because the split depends on all images of a folder.
    """
    for parent in checkpoint.parents:
        if (
            parent.role.startswith(("labels", "selection"))
            and _open_parent(checkpoint, parent).digest != _open_current(checkpoint, parent).digest
        ):
            raise NotFound(f"{PurePosixPath(parent.path).name} has changed since the run started")
    run = checkpoint.path.resolve().parents[1]
    if is_pairs_recipe(read_run_fields(run)):
        return _find_trained_pairs(checkpoint, run)
    config = read_run_config(run)
    parts = open_dataset(_locate_data(config, checkpoint)).parts
    listed = {parent.digest for parent in checkpoint.parents if parent.role.startswith("images")}
    for part in parts:
        if part.listing_digest not in listed:
            raise NotFound(f"{part.source.location} has other images than when the run started")
    return np.concatenate([part.sha256 for part in parts if part.sha256 is not None])


def _find_trained_pairs(checkpoint: Artifact, run: Path) -> _Digests:
    parents = {parent.role: parent for parent in checkpoint.parents}
    images_parent, embeddings_parent = parents["images"], parents.get("embeddings")
    config = build_config(PairsConfig, read_run_fields(run))
    data = config.data.model_copy(update={"pairs": _locate(checkpoint, images_parent)})
    embeddings = None if embeddings_parent is None else _open_parent(checkpoint, embeddings_parent)
    if embeddings is not None and embeddings.kind != "embeddings":
        embeddings = None  # the parent may be an artifact of augmented views: it has no digests
    config_with_current_paths = config.model_copy(update={"data": data})
    return digest_rows(_digest_pairs(config_with_current_paths, images_parent.digest, embeddings))


def _digest_pairs(
    config: PairsConfig, listing: str | None, embeddings: Artifact | None
) -> Sequence[bytes]:
    """Returns the SHA-256 of each image with a caption that is not held out.

    config: of the run, with the images' current path. listing: digest of the images' listing when
    the run started. embeddings: embeddings that the run read, which contain the digests; None reads
    the images. Raises NotFound if the images have changed, or are too many to read.
    """
    pairs = open_pairs(config)
    if pairs.source.listing_digest() != listing:
        raise NotFound(f"{config.data.pairs} has other images than when the run started")
    if embeddings is not None:
        artifact = EmbeddingsArtifact(embeddings)
        _, rows = match_embeddings(pairs, artifact)
        return [artifact.image_sha256[row] for row in rows.tolist()]
    if len(pairs) > _MAX_DIGESTED:
        raise NotFound(
            f"{config.data.pairs} has {len(pairs)} images, too many to compute their digests"
        )
    return [hashlib.sha256(pairs.source.read(entry)).digest() for entry in pairs.entries]


def _locate_data(config: RunConfig, checkpoint: Artifact) -> RunConfig:
    """Returns the config with the current paths of its data.

    The paths in the config are relative to where the run was started.
    """
    paths = {parent.role: _locate(checkpoint, parent) for parent in checkpoint.parents}
    sources = [
        source.model_copy(
            update={
                kind: paths[kind + (f"-{index}" if index else "")]
                for kind in ("images", "labels", "selection")
                if getattr(source, kind) is not None
            }
        )
        for index, source in enumerate(config.data.sources)
    ]
    updates = (
        {"mix": tuple(sources)} if config.data.mix else sources[0].model_dump(exclude={"weight"})
    )
    return config.model_copy(update={"data": config.data.model_copy(update=updates)})


def _open_centers(child: Artifact) -> Iterator[Artifact]:
    """Yields, each once, the centers of a run's or checkpoint's labels, and the centers that its
    classifier started from.
    """
    digests: set[str] = set()
    for parent in child.parents:
        if parent.role.startswith("labels"):
            labels = _open_parent(child, parent)
            links = [(labels, link) for link in labels.parents if link.role == "centers"]
        else:
            links = [(child, parent)] if parent.role == "centers" else []
        for owner, link in links:
            if link.digest not in digests:
                digests.add(link.digest)
                yield _open_parent(owner, link)


def _digest_clustered(centers: Artifact) -> _Digests:
    """Returns the digests of the images whose embeddings were clustered."""
    parent = next((parent for parent in centers.parents if parent.role == "embeddings"), None)
    if parent is None:
        raise NotFound(f"{centers.path} does not record the embeddings that it was made from")
    embeddings = EmbeddingsArtifact(_open_parent(centers, parent))
    names = {field.name for field in fields(ClusterOptions)}
    options = ClusterOptions(
        **{name: value for name, value in centers.config.items() if name in names}
    )
    rows, digests = rows_to_cluster(embeddings, options), digest_rows(embeddings.image_sha256)
    return digests if rows is None else digests[rows]


def _open_parent(child: Artifact, parent: Parent) -> Artifact:
    """Opens the parent in the state from which the child was made.

    Raises NotFound if the parent was moved or replaced by another artifact.
    """
    artifact = _open_current(child, parent)
    state = state_with_digest(artifact, parent.digest)
    if state is None:
        raise NotFound(f"{artifact.path} has changed since {child.path} was made from it")
    return state


def _open_current(child: Artifact, parent: Parent) -> Artifact:
    return open_artifact(Path(_locate(child, parent)), verify_files=False)


def _locate(child: Artifact, parent: Parent) -> str:
    path = parent_path(child, parent)
    if path is None:
        raise NotFound(f"{PurePosixPath(parent.path).name} is no longer at its path")
    return path


def _contains(tested: _Digests, digests: _Digests) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = pc.is_in(_column(tested), value_set=_column(digests)).to_numpy(
        zero_copy_only=False
    )
    return mask


def _column(digests: _Digests) -> pa.Array:
    buffer = pa.py_buffer(np.ascontiguousarray(digests))
    return pa.Array.from_buffers(pa.binary(DIGEST_BYTES), len(digests), [None, buffer])
