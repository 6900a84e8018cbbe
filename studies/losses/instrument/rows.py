"""The rows of the quick tiers: one for each finished run, kept in the state and gathered."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from studies.losses.hardware import Origin

_SECONDS: Final = "_s"  # the end of the names of durations
_NOT_COMPARED: Final = frozenset(
    {"cpu", "instructions", "cores", "device", "torch", "python", "commit", "command"}
)
Row = dict[str, Any]


class SlicedRun(Protocol):
    """One run of a quick tier, fully described by its name."""

    @property
    def name(self) -> str: ...

    @property
    def fields(self) -> Row:
        """Returns the columns that say what was run, the same for every run of an experiment."""
        ...


@dataclass(frozen=True)
class Outcome:
    """The numbers of a run by name, and a bit for each asked image: the answer was right.

    A number may also be a list of them, of several moments of the training. scratch: a directory
    that nothing needs any more once the row is kept.
    """

    numbers: dict[str, Any]
    right: NDArray[np.bool_]
    scratch: Path | None = None


def table_of(tier: str, results: Path) -> Path:
    """Returns the file of a tier's gathered rows."""
    return results / f"{tier}.parquet"


def path_of(run: SlicedRun, state: Path) -> Path:
    """Returns the file of a finished run."""
    return state / "runs" / f"{run.name}.json"


def write_row(tier: str, run: SlicedRun, outcome: Outcome, origin: Origin, state: Path) -> None:
    """Keeps the row of a run, whole or not at all.

    Raises ValueError where a number would take the place of a field that says what was run.
    """
    if twice := run.fields.keys() & outcome.numbers.keys():
        raise ValueError(f"{sorted(twice)} of {run.name} would be overwritten")
    row = {
        "run": run.name,
        **run.fields,
        **outcome.numbers,
        "right": np.packbits(outcome.right).tobytes().hex(),
        **origin.to_dict(),
        "command": f"python -m studies.losses --tier {tier} --data DATA --only {run.name}",
    }
    path = path_of(run, state)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".partial")
    written.write_text(json.dumps(row))
    written.rename(path)


def gather(tier: str, runs: Iterable[SlicedRun], state: Path, results: Path) -> Iterator[str]:
    """Writes the table of all rows, those that it has and those of the state, and yields a line for
    each run that both have.

    What was run is written anew from `runs`: a row of a time when a run had fewer fields gets them.
    """
    table = table_of(tier, results)
    rows = {row["run"]: row for row in read_rows(table)}
    for path in sorted((state / "runs").rglob("*.json")):
        row = json.loads(path.read_text())
        row["right"] = bytes.fromhex(row["right"])
        before = rows.get(row["run"])
        # Its seconds differ where the run was performed again.
        if before is not None and any(row[name] != before.get(name) for name in row):
            yield _compared(row, before)
        rows[row["run"]] = row
    for run in runs:
        if run.name in rows:
            rows[run.name] |= run.fields
    names = dict.fromkeys(name for row in rows.values() for name in row)
    results.mkdir(parents=True, exist_ok=True)
    columns = {name: [row.get(name) for row in rows.values()] for name in names}
    written = table.with_suffix(".partial")
    pq.write_table(pa.table(columns), written, compression="zstd")
    written.rename(table)


def read_rows(table: Path) -> list[Row]:
    """Returns the rows that `gather` wrote, if any."""
    rows: list[Row] = pq.read_table(table).to_pylist() if table.is_file() else []
    return rows


def _compared(row: Row, before: Row) -> str:
    names = [name for name in row if name not in _NOT_COMPARED and not name.endswith(_SECONDS)]
    others = [name for name in names if row[name] != before.get(name)]
    but = f", not {', '.join(others)}" if others else ""
    # rows of an earlier time do not say it
    of = f" ({before['instructions']})" if before.get("instructions") else ""
    return (
        f"{row['run']}: {len(names) - len(others)} of {len(names)} fields as before{but}, "
        f"at {before['commit']} on {before['cpu']}{of}"
    )
