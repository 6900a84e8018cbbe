"""The labels or embeddings of a job as one file: parquet, CSV, JSON lines, COCO, or a zip with the
pictures by cluster.

Files are written as streams; the columns of one part are in memory at a time.
"""

import csv
import io
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any, Final

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.labels import LabelTable
from mlcd.artifacts.manifest import Artifact
from mlcd.errors import ImageRejected
from mlcd.images.source import Source
from mlcd.types import Embeddings, SampleKey

_ROWS: Final = 1024  # read at a time
_SCORE_DIGITS: Final = 4  # a score is a float16
_CSV_FIELDS: Final = ("id", "similarity", "name", "cluster")
_UNSAFE: Final = re.compile(r"[^\w .()+-]+")
_NAME_CHARS: Final = 100


@dataclass(frozen=True)
class FinishedWork:
    """An artifact of `mlcd label` or `mlcd embed`, and the source that it was made from."""

    artifact: Artifact
    source: Source


def write_results(work: FinishedWork, form: str, out: IO[bytes]) -> None:
    """Writes the results to `out`, which need not be seekable.

    form: `parquet` or `jsonl`; of labels also `csv`, `coco` or `zip`.
    """
    _WRITERS[work.artifact.kind][form](work, out)


def _write_label_parquet(work: FinishedWork, out: IO[bytes]) -> None:
    table = LabelTable(work.artifact)
    names = None if table.names is None else pa.array(table.names, pa.string())
    writer = None
    for batch in table.iter_batches(_ROWS):
        columns = {
            "key": batch["key"].cast(pa.string()),
            "ids": batch["ids"],
            "scores": batch["scores"].cast(pa.list_(pa.float32())),
        }
        if names is not None:
            ids = batch["ids"]
            columns["names"] = pa.ListArray.from_arrays(ids.offsets, names.take(ids.values))
        part = pa.table(columns)
        writer = writer or pq.ParquetWriter(out, part.schema)
        writer.write_table(part)
    if writer is not None:
        writer.close()


def _write_label_csv(work: FinishedWork, out: IO[bytes]) -> None:
    """Writes a row for each label. rank: from 1."""
    text = io.TextIOWrapper(out, encoding="utf-8", newline="", write_through=True)
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["key", "rank", *_CSV_FIELDS])
    for key, labels in _labels(work):
        for rank, label in enumerate(labels, 1):
            rows.writerow([key, rank, *(label[name] for name in _CSV_FIELDS)])
    text.detach()


def _write_label_lines(work: FinishedWork, out: IO[bytes]) -> None:
    for key, labels in _labels(work):
        out.write(orjson.dumps({"key": key, "labels": labels}) + b"\n")


def _write_coco(work: FinishedWork, out: IO[bytes]) -> None:
    """Writes labels as annotations without boxes, and only the categories that occur."""
    categories: dict[int, str | None] = {}
    out.write(b'{"images":[')
    for number, (key, _) in enumerate(_labels(work)):
        out.write(b",\n" * (number > 0) + orjson.dumps({"id": number, "file_name": key}))
    out.write(b'],"annotations":[')
    annotation_id = 0
    for number, (_, labels) in enumerate(_labels(work)):
        for label in labels:
            categories[label["id"]] = label["name"]
            annotation = {
                "id": annotation_id,
                "image_id": number,
                "category_id": label["id"],
                "score": label["similarity"],
            }
            out.write(b",\n" * (annotation_id > 0) + orjson.dumps(annotation))
            annotation_id += 1
    listed = [
        {"id": id_, "name": name or f"cluster {id_}"} for id_, name in sorted(categories.items())
    ]
    out.write(b'],"categories":' + orjson.dumps(listed) + b"}")


def _write_label_zip(work: FinishedWork, out: IO[bytes]) -> None:
    """Writes labels.parquet, and each picture in a folder of its nearest cluster."""
    first = {key: labels[0] for key, labels in _labels(work) if labels}
    with zipfile.ZipFile(out, "w") as archive:
        with archive.open("labels.parquet", "w", force_zip64=True) as table:
            _write_label_parquet(work, table)
        taken: set[str] = set()
        for number, entry in enumerate(work.source.entries):
            key = entry.key
            if key not in first:
                continue
            try:
                data = work.source.read(entry)
            except ImageRejected:  # it was labeled before, so the file has changed since
                continue
            path = f"{_folder_of(first[key])}/{_file_name(key)}"
            path = (
                path
                if path not in taken
                else f"{_folder_of(first[key])}/{number} {_file_name(key)}"
            )
            taken.add(path)
            archive.writestr(path, data)


def _folder_of(label: Mapping[str, Any]) -> str:
    name = f"{label['cluster']} {label['name'] or ''}".strip()
    return _UNSAFE.sub("_", name)[:_NAME_CHARS]


def _file_name(key: str) -> str:
    return _UNSAFE.sub("_", PurePosixPath(key).name)[-_NAME_CHARS:] or "image"


def _labels(work: FinishedWork) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the key of each image and its labels, best first, with the fields of /v1/labels."""
    table = LabelTable(work.artifact)
    names = table.names
    for batch in table.iter_batches(_ROWS):
        for row in batch.to_pylist():
            ids = row["ids"]
            clusters, paths = row.get("clusters", ids), row.get("paths", [None] * len(ids))
            labels = zip(ids, row["scores"], clusters, paths, strict=True)
            yield (
                row["key"],
                [
                    {
                        "id": id_,
                        "similarity": round(float(score), _SCORE_DIGITS),
                        "name": None if names is None else names[id_],
                        "cluster": cluster,
                        "path": path,
                    }
                    for id_, score, cluster, path in labels
                ],
            )


def _write_embedding_parquet(work: FinishedWork, out: IO[bytes]) -> None:
    writer = None
    for keys, rows in _embedding_blocks(work):
        vectors = pa.FixedSizeListArray.from_arrays(rows.reshape(-1), rows.shape[1])
        part = pa.table({"key": pa.array(keys, pa.string()), "embedding": vectors})
        writer = writer or pq.ParquetWriter(out, part.schema)
        writer.write_table(part)
    if writer is not None:
        writer.close()


def _write_embedding_lines(work: FinishedWork, out: IO[bytes]) -> None:
    for keys, rows in _embedding_blocks(work):
        for key, row in zip(keys, rows, strict=True):
            line = {"key": key, "embedding": row}
            out.write(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")


def _embedding_blocks(work: FinishedWork) -> Iterator[tuple[list[SampleKey], Embeddings]]:
    artifact = EmbeddingsArtifact(work.artifact)
    for block in artifact.plan(_ROWS):
        yield artifact.read_keys(block)[0], artifact.read(block)


_Writer = Callable[[FinishedWork, IO[bytes]], None]
_WRITERS: Final[Mapping[str, Mapping[str, _Writer]]] = {
    "labels": {
        "parquet": _write_label_parquet,
        "csv": _write_label_csv,
        "jsonl": _write_label_lines,
        "coco": _write_coco,
        "zip": _write_label_zip,
    },
    "embeddings": {"parquet": _write_embedding_parquet, "jsonl": _write_embedding_lines},
}
