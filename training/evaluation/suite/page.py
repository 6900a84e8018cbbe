"""The report of a suite: one table beside published figures, and the same as JSON."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlcd.artifacts.disk import write_synced
from training.evaluation.kept import Record
from training.evaluation.suite.definitions import (
    AVERAGED,
    IMAGENET,
    PUBLISHED,
    PUBLISHED_ZERO_SHOT,
)
from training.evaluation.suite.run import Line, Suite

_NONE: Final = "-"
_NOTE: Final = """
Numbers are percent, with 95 % intervals over images. The probe is CLIP's protocol on embeddings as
they are served; published figures are of features before the projection. Train, test and split are
those of the probe: compare numbers only where the split is the same. Zero-shot tests all images of
a data set that has no parts.
"""


def write_page(suite: Suite, out: Path) -> None:
    """Writes report.json and report.md into `out`."""
    facts = {**suite.facts(), "means": means(suite)}
    text = json.dumps(facts, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_synced(out / "report.json", text.encode())
    write_synced(out / "report.md", page(suite).encode())


def page(suite: Suite) -> str:
    """Returns the report in Markdown."""
    return "\n".join(
        [
            f"# {os.path.basename(suite.model)}",  # noqa: PTH119 - a URL of the hub is no path
            "",
            f"Fingerprint `{suite.fingerprint[:12]}`.",
            _NOTE,
            "| data set | metric | linear probe | zero-shot | train | test | split | seen |",
            "|---|---|---|---|---|---|---|---|",
            *map(_row, suite.lines),
            "",
            *_means_lines(suite),
            "",
            *_reasons(suite.lines),
            f"Not there: {', '.join(suite.missing) or 'none'}.",
            "",
        ]
    )


def means(suite: Suite) -> dict[str, Any]:
    """Returns the unweighted mean of CLIP's sets that are here, and how many those are."""
    found = {}
    for kind in ("probe", "zero_shot"):
        figures = [
            main_figure(record, line.metric)
            for line in suite.lines
            if line.name in AVERAGED and (record := getattr(line, kind)) is not None
        ]
        found[kind] = {"sets": len(figures), "mean": float(np.mean(figures)) if figures else None}
    return found


def main_figure(record: Record, metric: str | None = None) -> float:
    """Returns the number that a record is about."""
    name = _name_of(record, metric)
    return float(record["metrics"][name])


def _name_of(record: Record, metric: str | None) -> str:
    if record["protocol"]["kind"] == "zero-shot":
        return "zero_shot_mean_per_class" if metric == "mean-per-class" else "zero_shot_top1"
    name: str
    (name,) = (name for name in record["metrics"] if name.startswith("linear_probe_"))
    return name


def _row(line: Line) -> str:
    record = line.probe or line.zero_shot
    protocol = {} if record is None else record["protocol"]
    cells = [
        line.title,
        line.metric,
        _figure(line.probe, line.metric),
        _figure(line.zero_shot, line.metric),
        str(protocol.get("train", "")),
        str(protocol.get("test", "")),
        f"`{protocol['split'][:12]}`" if protocol else "",
        "unknown" if line.seen is None else _seen_words(line.seen),
    ]
    return f"| {' | '.join(cells)} |"


def _seen_words(seen: dict[str, Any]) -> str:
    unknown = "; not all is known" if seen["unknown"] else ""
    return f"{seen['images']} of {seen['of']}{unknown}"


def _figure(record: Record | None, metric: str) -> str:
    if record is None:
        return _NONE
    name = _name_of(record, metric)
    low, high = record["intervals"][name]
    return f"{100 * record['metrics'][name]:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _means_lines(suite: Suite) -> Iterator[str]:
    found = means(suite)
    yield "| model | sets | probe, mean | ImageNet, probe |"
    yield "|---|---|---|---|"
    yield _mean_row("this one", found["probe"], _imagenet(suite, "probe"))
    for model, mean, imagenet in PUBLISHED:
        yield f"| {model} | {len(AVERAGED)} | {mean} | {imagenet or _NONE} |"
    yield ""
    yield "| model | sets | zero-shot, mean | ImageNet, zero-shot |"
    yield "|---|---|---|---|"
    yield _mean_row("this one", found["zero_shot"], _imagenet(suite, "zero_shot"))
    for model, mean, imagenet in PUBLISHED_ZERO_SHOT:
        yield f"| {model} | 25 | {mean} | {imagenet} |"


def _mean_row(name: str, found: dict[str, Any], imagenet: float | None) -> str:
    mean = _NONE if found["mean"] is None else f"{100 * found['mean']:.1f}"
    shown = _NONE if imagenet is None else f"{100 * imagenet:.1f}"
    return f"| {name} | {found['sets']} | {mean} | {shown} |"


def _imagenet(suite: Suite, kind: str) -> float | None:
    line = next((line for line in suite.lines if line.name == IMAGENET), None)
    record = None if line is None else getattr(line, kind)
    return None if record is None else main_figure(record)


def _reasons(lines: Sequence[Line]) -> Iterator[str]:
    for line in lines:
        if len(line.reasons) > 1 and len(set(line.reasons.values())) == 1:
            yield f"- {line.title}: {next(iter(line.reasons.values()))}"
        else:
            yield from (f"- {line.title}, no {kind}: {why}" for kind, why in line.reasons.items())
    yield ""
