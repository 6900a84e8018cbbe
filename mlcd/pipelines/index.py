"""Embeddings to a searchable index."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mlcd.artifact import Artifact, Draft, Request, find_published
from mlcd.collections.snapshot import INDEX, KEYS
from mlcd.embeddings import EmbeddingsArtifact
from mlcd.indexes.faiss import FaissIndex
from mlcd.progress import Meter, Reporter
from mlcd.types import Embeddings


def index(embeddings: EmbeddingsArtifact, out: Path, reporter: Reporter) -> Artifact:
    """A faiss index over all rows, with their keys."""
    request = Request("index", {}, (embeddings.artifact.as_parent_of(out, "embeddings"),), embeddings.fingerprint)
    if (done := find_published(out, request)) is not None:
        return done
    with Draft(out, request) as draft:
        with reporter.stage("index", embeddings.num_rows) as meter:
            blocks = _metered(embeddings, meter)
            built = FaissIndex.build(blocks, dimension=embeddings.dimension)
        with draft.write(INDEX) as path:
            built.write(path)
        with draft.write(KEYS) as path:
            class_names = pa.array(embeddings.class_names, pa.string())
            pq.write_table(pa.table({"key": embeddings.keys, "class_name": class_names}), path)
        return draft.publish(summary={"items": embeddings.num_rows, "kind": "flat"})


def _metered(embeddings: EmbeddingsArtifact, meter: Meter) -> Iterator[Embeddings]:
    for _, block in embeddings.blocks():
        yield block
        meter.advance(len(block))
