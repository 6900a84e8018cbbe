"""The rows of the frozen tier: one for each finished run, kept in the state and gathered."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from studies.losses.frozen.arms import FrozenRun
from studies.losses.frozen.run import Outcome
from studies.losses.hardware import Origin

TABLE: Final = "frozen.parquet"
_NOT_COMPARED: Final = frozenset(
    {"cluster_s", "train_s", "evaluation_s", "cpu", "cores", "device", "torch", "python", "commit"}
)
_Row = dict[str, Any]


def path_of(run: FrozenRun, state: Path) -> Path:
    """Returns the file of a finished run."""
    return state / "runs" / f"{run.name}.json"


def write_row(run: FrozenRun, outcome: Outcome, origin: Origin, state: Path) -> None:
    """Keeps the row of a run, whole or not at all."""
    row = {
        "run": run.name,
        "teacher": run.teacher,
        "arm": run.arm.name,
        "seed": run.seed,
        **asdict(run.arm),
        **outcome.numbers,
        "right": np.packbits(outcome.right).tobytes().hex(),
        **origin.to_dict(),
        "command": f"python -m studies.losses --tier frozen --only {run.name}",
    }
    path = path_of(run, state)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".partial")
    written.write_text(json.dumps(row))
    written.rename(path)


def gather(state: Path, results: Path) -> Iterator[str]:
    """Writes the table of all rows, those that it has and those of the state, and yields a line for
    each run that both have.
    """
    table = results / TABLE
    rows = {row["run"]: row for row in read_rows(table)}
    for path in sorted((state / "runs").rglob("*.json")):
        row = json.loads(path.read_text())
        row["right"] = bytes.fromhex(row["right"])
        before = rows.get(row["run"])
        if before is not None and before["commit"] != row["commit"]:
            yield _compared(row, before)
        rows[row["run"]] = row
    names = dict.fromkeys(name for row in rows.values() for name in row)
    results.mkdir(parents=True, exist_ok=True)
    columns = {name: [row.get(name) for row in rows.values()] for name in names}
    written = table.with_suffix(".partial")
    pq.write_table(pa.table(columns), written, compression="zstd")
    written.rename(table)


def read_rows(table: Path) -> list[_Row]:
    """Returns the rows that `gather` wrote, if any."""
    rows: list[_Row] = pq.read_table(table).to_pylist() if table.is_file() else []
    return rows


def _compared(row: _Row, before: _Row) -> str:
    names = [name for name in row if name not in _NOT_COMPARED]
    same = [name for name in names if row[name] == before.get(name)]
    return (
        f"{row['run']}: {len(same)} of {len(names)} fields as before, at {before['commit']}"
        f" on {before['cpu']}"
    )
