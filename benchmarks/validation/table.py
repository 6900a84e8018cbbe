"""The raw numbers of a study: one row per measurement, and the curves, as parquet."""

import json
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.validation.references import references
from benchmarks.validation.run import CURVES, Study

RESULTS: Final = Path(__file__).resolve().parent / "results"


def gather(study: Study, folder: Path) -> None:
    """Write TIER.parquet and TIER-curves.parquet of everything that is finished."""
    folder.mkdir(parents=True, exist_ok=True)
    results = study.results()
    rows = [row for result in [*results, *references(study)] for row in _rows(study, result)]
    curves = [
        {"run": result["name"], "step": int(point["step"]), **{name: _number(point[name]) for name in CURVES}}
        for result in results
        for point in result["curves"]
        if result["stage"] != "tune"
    ]
    _write(rows, folder / f"{study.tier.name}.parquet")
    _write(curves, folder / f"{study.tier.name}-curves.parquet")


def read(path: Path) -> list[dict[str, Any]]:
    """The rows that `gather` wrote; none where it wrote none."""
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist() if path.is_file() else []
    return rows


def _rows(study: Study, result: dict[str, Any]) -> list[dict[str, Any]]:
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
        "command": f"python -m benchmarks.validation --tier {study.tier.name} {what}",
    }
    return [{**common, **measured} for measured in result["measurements"]]


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    if not rows:
        return
    written = path.with_suffix(".partial")
    pq.write_table(pa.Table.from_pylist(rows), written, compression="zstd")
    written.rename(path)
