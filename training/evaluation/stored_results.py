"""The artifact of an evaluation: its results, and for each tested image if it was right.

results.json         one record per representation: metrics, intervals, protocol
images-00000.parquet key, class_name, and right (bool) of the tested images of the first record
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.manifest import Artifact, Request, open_artifact
from mlcd.errors import InvalidInput
from mlcd.types import SampleKey

RESULTS: Final = "results.json"

Record: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class StoredOutcome:
    """The tested images of one record, in order.

    right: bool [N]. columns: further columns by name, [N] each.
    """

    keys: Sequence[SampleKey]
    class_names: Sequence[str | None]
    right: NDArray[np.bool_]
    columns: Mapping[str, NDArray[Any]]

    def table(self) -> pa.Table:
        columns = {"key": pa.array(self.keys, pa.string()), "right": pa.array(self.right)}
        names = {"class_name": pa.array(self.class_names, pa.string())}
        return pa.table({**columns, **names, **{n: pa.array(v) for n, v in self.columns.items()}})


def outcomes_name(record: int) -> str:
    return f"images-{record:05d}.parquet"


def find_results(out: Path | None, request: Request) -> list[Record] | None:
    """Returns the records of the finished artifact for this request; None if there is none."""
    artifact = None if out is None else find_published(out, request)
    return None if artifact is None else read_results(artifact)


def read_results(artifact: Artifact) -> list[Record]:
    records: list[Record] = json.loads(artifact.file(RESULTS).read_text(encoding="utf-8"))
    return records


def write_results(
    out: Path, request: Request, records: Sequence[Record], outcomes: Sequence[StoredOutcome | None]
) -> None:
    """Writes an evaluation artifact."""
    with Draft(out, request) as draft:
        for index, outcome in enumerate(outcomes):
            if outcome is not None:
                with draft.write(outcomes_name(index)) as path:
                    pq.write_table(outcome.table(), path)
        draft.write_json(RESULTS, records)
        draft.publish()


@dataclass(frozen=True)
class StoredResults:
    """A stored record, with the outcome for each image."""

    record: Record
    keys: list[SampleKey]
    right: NDArray[np.bool_]


def read_stored_results(path: Path) -> StoredResults:
    """Opens an evaluation of one representation.

    Raises InvalidInput if it has several representations, or no outcomes of images.
    """
    artifact = open_artifact(path, "evaluation")
    records = read_results(artifact)
    if len(records) != 1:
        raise InvalidInput(
            f"{path} must contain the results of 1 representation, got {len(records)}",
            remedy="evaluate each representation separately, with its own --out",
        )
    if outcomes_name(0) not in artifact.files:
        raise InvalidInput(
            f"{path} has no outcomes of images",
            remedy="compare evaluations of knn, linear-probe, fine-tune, zero-shot or retrieval",
        )
    table = pq.read_table(artifact.file(outcomes_name(0)), columns=["key", "right"])
    return StoredResults(records[0], table["key"].to_pylist(), table["right"].to_numpy())


def find_or_create(
    out: Path | None,
    request: Callable[[Path], Request],
    make: Callable[[], tuple[Record, StoredOutcome]],
) -> Record:
    """Returns the record stored at `out`; creates and stores it if it does not exist."""
    if out is None:
        return make()[0]
    request_here = request(out)
    if (records := find_results(out, request_here)) is not None:
        return records[0]
    record, outcome = make()
    write_results(out, request_here, [record], [outcome])
    return record
