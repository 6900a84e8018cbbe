"""The raw numbers of a study as parquet: one row per measurement, and the curves."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from studies.losses.references import references
from studies.losses.run import CURVES, Study

RESULTS: Final = Path(__file__).resolve().parent / "results"
_Row = dict[str, Any]
_ByRun = dict[str, list[_Row]]


@dataclass(frozen=True)
class Repeated:
    """A run that a table had before, from another state.

    same_numbers, same_points: the number of its measurements, and of the points of its curve, that
    are equal to the last bit. commit: that of the earlier run.
    """

    run: str
    commit: str
    same_numbers: int
    num_numbers: int
    same_points: int
    num_points: int

    def __str__(self) -> str:
        numbers = f"{self.same_numbers} of {self.num_numbers} numbers"
        points = f"{self.same_points} of {self.num_points} points of the curve"
        return f"{self.run}: {numbers} and {points} as before, at {self.commit}"


def gather(study: Study, folder: Path) -> list[Repeated]:
    """Writes TIER.parquet and TIER-curves.parquet of everything that is finished.

    Other runs in them, of other states, are kept. Those that this state made again are replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = study.results()
    rows = [row for result in [*results, *references(study)] for row in _rows(study, result)]
    curves = [
        {
            "run": result["name"],
            "step": int(point["step"]),
            **{name: _number(point[name]) for name in CURVES},
        }
        for result in results
        for point in result["curves"]
        if result["stage"] != "tune"
    ]
    numbers_file, curves_file = (
        folder / f"{study.tier.name}{kind}.parquet" for kind in ("", "-curves")
    )
    rows_before, curves_before = _by_run(read(numbers_file)), _by_run(read(curves_file))
    _write({**rows_before, **_by_run(rows)}, numbers_file)
    _write({**curves_before, **_by_run(curves)}, curves_file)
    return list(_repeated(rows_before, _by_run(rows), curves_before, _by_run(curves)))


def _by_run(rows: Iterable[_Row]) -> _ByRun:
    by_run: _ByRun = {}
    for row in rows:
        by_run.setdefault(row["run"], []).append(row)
    return by_run


def _repeated(
    rows_before: _ByRun, rows: _ByRun, curves_before: _ByRun, curves: _ByRun
) -> Iterator[Repeated]:
    for run, now in rows.items():
        before = rows_before.get(run, now)
        # The run was gathered before.
        if before == now:
            continue
        same_numbers = sum(value in _values(before) for value in _values(now))
        points, points_before = curves.get(run, []), curves_before.get(run, [])
        same_points = sum(point in points_before for point in points)
        yield Repeated(run, before[0]["commit"], same_numbers, len(now), same_points, len(points))


def _values(rows: list[_Row]) -> list[tuple[str, str, str, float]]:
    return [(row["set"], row["task"], row["metric"], row["value"]) for row in rows]


def read(path: Path) -> list[_Row]:
    """Returns the rows that `gather` wrote, if any."""
    rows: list[_Row] = pq.read_table(path).to_pylist() if path.is_file() else []
    return rows


def _rows(study: Study, result: dict[str, Any]) -> list[_Row]:
    what = "--references" if result["stage"] == "reference" else f"--only {result['name']}"
    common = {
        "run": result["name"],
        "stage": result["stage"],
        "arm": result["arm"],
        "seed": result["seed"],
        "setting": json.dumps(result["setting"]),
        "variant": json.dumps(result["variant"]),
        "steps": result["steps"],
        "threads": result["threads"],
        "train_s": round(result["train_s"], 1),
        "train_cpu_s": round(result["train_cpu_s"], 1),
        "evaluation_s": round(result["evaluation_s"], 1),
        **result["origin"],
        "command": f"python -m studies.losses --tier {study.tier.name} {what}",
    }
    return [{**common, **measured} for measured in result["measurements"]]


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def _write(by_run: _ByRun, path: Path) -> None:
    if not by_run:
        return
    written = path.with_suffix(".partial")
    rows = [row for rows in by_run.values() for row in rows]
    # Those of another version may differ.
    names = dict.fromkeys(name for row in rows for name in row)
    pq.write_table(
        pa.table({name: [row.get(name) for row in rows] for name in names}),
        written,
        compression="zstd",
    )
    written.rename(path)
