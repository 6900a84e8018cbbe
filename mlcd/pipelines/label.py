"""Embeddings and centers to the labels artifact."""

import shutil
from pathlib import Path
from typing import Final

from mlcd.artifact import Artifact, Draft, Request, find_published, open_artifact
from mlcd.clustering.centers import Centers
from mlcd.clustering.nearest import nearest_centers
from mlcd.embeddings import ERRORS, EmbeddingsArtifact
from mlcd.errors import ConfigInvalid
from mlcd.labels.table import NAMES, part_name, write_part
from mlcd.progress import Reporter

_PART_ROWS: Final = 65536


def label(
    embeddings: EmbeddingsArtifact,
    centers_path: Path,
    out: Path,
    *,
    top: int,
    threshold: float | None,
    reporter: Reporter,
) -> Artifact:
    """The `top` nearest centers of every row, exact; with `threshold`, only those at least so similar.

    Raises ConfigInvalid when the centers are of another model than the embeddings.
    """
    if threshold is not None and not -1.0 <= threshold <= 1.0:
        raise ConfigInvalid(f"the threshold {threshold} is no cosine", remedy="give one between -1 and 1")
    artifact = open_artifact(centers_path, "centers")
    centers = Centers.read(artifact)
    _check_fingerprint(embeddings, centers, centers_path)
    num_centers = len(centers.vectors)
    request = Request(
        "labels",
        {"top": min(top, num_centers), "threshold": threshold, "mode": "exact", "num_centers": num_centers},
        (embeddings.artifact.as_parent_of(out, "embeddings"), artifact.as_parent_of(out, "centers")),
        embeddings.fingerprint,
    )
    if (done := find_published(out, request)) is not None:
        return done
    with Draft(out, request) as draft, reporter.stage("label", embeddings.num_rows) as meter:
        for part, (start, block) in enumerate(embeddings.blocks(_PART_ROWS)):
            rows = slice(start, start + len(block))
            if not draft.has(part_name(part)):
                found = nearest_centers(centers.align(block), centers.vectors, min(top, num_centers), threshold)
                write_part(draft, part, embeddings.keys[rows], embeddings.image_sha256[rows], found)
            meter.advance(len(block))
        if centers.names is not None:
            draft.write_json(NAMES, list(centers.names))
        with draft.write(ERRORS) as path:
            shutil.copyfile(embeddings.artifact.file(ERRORS), path)
        return draft.publish(summary={"images": embeddings.num_rows, "centers": num_centers})


def _check_fingerprint(embeddings: EmbeddingsArtifact, centers: Centers, centers_path: Path) -> None:
    if centers.fingerprint != embeddings.fingerprint:
        raise ConfigInvalid(
            f"{centers_path} and {embeddings.artifact.path} are of two models"
            f" ({centers.fingerprint[:12]} and {embeddings.fingerprint[:12]})",
            remedy="embed the images with the model of the centers, or cluster these embeddings",
        )
