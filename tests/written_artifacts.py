"""Artifacts of given rows, as `mlcd embed` and `mlcd cluster` would have written them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.embeddings import ERRORS, KEY_SCHEMA, keys_name, part_name
from mlcd.artifacts.manifest import Artifact, Request
from mlcd.keys import split_positions
from mlcd.types import unit_rows

FINGERPRINT = "f" * 64


def write_centers(
    out: Path, vectors: np.ndarray, fingerprint: str = FINGERPRINT, *, config=None, **options: Any
) -> Artifact:
    """Centers of one member each at `out`. vectors: (c, d). options: those of `Centers`."""
    with Draft(out, Request("centers", config or {}, fingerprint=fingerprint)) as draft:
        sizes = np.ones(len(vectors), np.int64)
        Centers(unit_rows(vectors), sizes, fingerprint, **options).write(draft)
        return draft.publish()


def write_embeddings(
    out: Path,
    parts: Sequence[np.ndarray],
    keys: Sequence[str] | None = None,
    classes: Sequence[str | None] | None = None,
    *,
    fingerprint: str = FINGERPRINT,
) -> Path:
    """Embeddings at `out`. parts: rows as they are, (r_p, d) each. keys: numbers of seven digits,
    if not given; more or fewer than there are rows are those of the last part.
    """
    keys = keys or [f"{number:07d}" for number in range(sum(map(len, parts)))]
    classes = classes or [None] * len(keys)
    table = pa.table(
        {
            "key": keys,
            "class_name": classes,
            "sha256": [number.to_bytes(32, "big") for number in range(len(keys))],
            "split": split_positions(keys, classes),
        },
        schema=KEY_SCHEMA,
    )
    first = 0
    with Draft(out, Request("embeddings", fingerprint=fingerprint)) as draft:
        for part, rows in enumerate(parts):
            with draft.write(part_name(part)) as path, path.open("wb") as file:
                np.save(file, rows)
            length = len(rows) if part < len(parts) - 1 else None
            with draft.write(keys_name(part)) as path:
                pq.write_table(table.slice(first, length), path)
            first += len(rows)
        (draft.path / ERRORS).write_text("")
        draft.publish()
    return out
