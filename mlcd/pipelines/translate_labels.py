"""Translates labels made with an earlier state of centers to clusters of the current state."""

from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.labels import LabelTable
from mlcd.artifacts.living_centers import LivingCenters
from mlcd.artifacts.manifest import Artifact, Request, open_artifact
from mlcd.clustering.nearest import nearest_with_distances
from mlcd.errors import ConfigInvalid, NotFound
from mlcd.pipelines.used_embeddings import open_used_embeddings
from mlcd.types import unit_rows

TRANSLATED: Final = "translated.parquet"


def translate(
    labels: Path, centers: Path, out: Path, *, embeddings: Path | None = None
) -> Artifact:
    """Writes for each image the cluster of its first label, and the cluster of its nearest center
    now.

    The summary's `disagreement` is the share of images for which these differ. embeddings: of the
    images; by default those that the labels were made from. Raises ConfigInvalid if the labels were
    made with other centers, NotFound if the embeddings are missing or lack an image.
    """
    table, artifact = LabelTable.open(labels), open_artifact(centers, "centers")
    state = LivingCenters.read(artifact)
    journal = state.journal
    if table.classes not in (journal.origin, *journal.made, artifact.digest):
        raise ConfigInvalid(
            f"{labels} must be labels by {centers} or an earlier state of these centers",
            remedy="label the images again",
        )
    used = open_used_embeddings(table.artifact, embeddings)
    parents = (
        table.artifact.as_parent_of(out, "labels"),
        artifact.as_parent_of(out, "centers"),
        used.artifact.as_parent_of(out, "embeddings"),
    )
    request = Request("translation", {}, parents, artifact.fingerprint)
    if (done := find_published(out, request)) is not None:
        return done
    before = table.ids[:, 0]
    labeled = before >= 0
    row_of = {key: row for row, key in enumerate(used.keys)}
    if missing_key := next((key for key in table.keys if key not in row_of), None):
        raise NotFound(
            f"the embeddings {used.artifact.path} lack {missing_key}",
            remedy="give embeddings of the labeled images",
        )
    rows = used.rows_at(np.array([row_of[key] for key in table.keys], np.int64))
    ids, _ = nearest_with_distances(state.centers.align(unit_rows(rows)), state.centers.vectors)
    now = state.clusters[ids]
    cluster = np.where(labeled, state.clusters[np.where(labeled, before, 0)], -1)
    with Draft(out, request) as draft:
        columns = {
            "key": pa.array(table.keys, pa.large_string()),
            "before": pa.array(before, mask=~labeled),
            "cluster": pa.array(cluster.astype(np.int32), mask=~labeled),
            "now": pa.array(now),
        }
        with draft.write(TRANSLATED) as path:
            pq.write_table(pa.table(columns), path)
        differs = (cluster != now)[labeled]
        facts = {
            "images": len(differs),
            "disagreement": float(differs.mean()) if len(differs) else 0.0,
        }
        return draft.publish(summary=facts)
