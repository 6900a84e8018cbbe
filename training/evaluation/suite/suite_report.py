"""Writes the report of a suite: tables beside published results, the same as JSON, and a chart."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlcd.artifacts.disk import write_synced
from mlcd.training.evaluation.stored_results import Record
from mlcd.training.evaluation.suite.definitions import (
    AVERAGED,
    PUBLISHED,
    PUBLISHED_ZERO_SHOT,
)
from mlcd.training.evaluation.suite.radar import MIN_AXES, radar
from mlcd.training.evaluation.suite.run_suite import Line, Suite
from mlcd.training.evaluation.texts.imagenet import IMAGENET

_NONE: Final = "-"
_COLUMNS: Final = (
    "data set",
    "metric",
    "model",
    "linear probe",
    "zero-shot",
    "train",
    "test",
    "split",
    "seen",
)
_PICTURE: Final = "report.svg"
_KINDS: Final = (("probe", "linear probe"), ("zero_shot", "zero-shot"))
_NOTE: Final = """
Numbers are percent, with 95 % intervals over images. The probe is CLIP's protocol on served
embeddings; published figures use features before the projection. Train, test and split describe
the probe: compare numbers only if the split is the same. Zero-shot tests all images of a data set
without parts. `seen` counts the images of a data set that the model's run has seen.
"""


def write_page(suites: Sequence[Suite], out: Path) -> None:
    """Writes report.json, report.md and, for three or more data sets, report.svg into `out`."""
    text = json.dumps(facts(suites), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_synced(out / "report.json", text.encode())
    if (drawn := picture(suites)) is not None:
        write_synced(out / _PICTURE, drawn.encode())
    write_synced(out / "report.md", page(suites).encode())


def facts(suites: Sequence[Suite]) -> dict[str, Any]:
    """Returns the contents of the report as JSON fields."""
    return {"models": [{**suite.facts(), "means": means(suite)} for suite in suites]}


def page(suites: Sequence[Suite]) -> str:
    """Returns the report in Markdown."""
    return "\n".join(
        [
            f"# {', '.join(suite.model for suite in suites)}",
            _NOTE,
            f"| {' | '.join(_COLUMNS)} |",
            f"{'|---' * len(_COLUMNS)}|",
            *_rows(suites),
            "",
            *([] if picture(suites) is None else [f"![each data set an axis]({_PICTURE})", ""]),
            *_means_lines(suites),
            "",
            *_reasons(suites),
            f"Missing: {', '.join(suites[0].missing) or 'none'}.",
            "",
            *(f"{suite.model} has the fingerprint `{suite.fingerprint[:12]}`." for suite in suites),
            "",
        ]
    )


def picture(suites: Sequence[Suite]) -> str | None:
    """Returns the radar chart of the results; None if too few data sets have one."""
    names = [line.title for line in suites[0].lines]
    rings = {
        f"{suite.model}, {title}": values
        for suite in suites
        for kind, title in _KINDS
        if set(values := [_share(line, kind) for line in suite.lines]) != {None}
    }
    axes = [
        axis for axis in range(len(names)) if any(ring[axis] is not None for ring in rings.values())
    ]
    if len(axes) < MIN_AXES:
        return None
    chosen = {title: [ring[axis] for axis in axes] for title, ring in rings.items()}
    return radar([names[axis] for axis in axes], chosen)


def _share(line: Line, kind: str) -> float | None:
    record = getattr(line, kind)
    return None if record is None else main_figure(record, line.metric)


def means(suite: Suite) -> dict[str, Any]:
    """Returns the unweighted mean over the present data sets of CLIP, and their number."""
    mean_of = {}
    for kind, _ in _KINDS:
        figures = [
            figure
            for line in suite.lines
            if line.name in AVERAGED and (figure := _share(line, kind)) is not None
        ]
        mean_of[kind] = {"sets": len(figures), "mean": float(np.mean(figures)) if figures else None}
    return mean_of


def main_figure(record: Record, metric: str | None = None) -> float:
    """Returns the main metric of a record."""
    name = _name_of(record, metric)
    return float(record["metrics"][name])


def _name_of(record: Record, metric: str | None) -> str:
    if record["protocol"]["kind"] == "zero-shot":
        return "zero_shot_mean_per_class" if metric == "mean-per-class" else "zero_shot_top1"
    name: str
    (name,) = (name for name in record["metrics"] if name.startswith("linear_probe_"))
    return name


def _rows(suites: Sequence[Suite]) -> Iterator[str]:
    """Yields the rows of each data set, one for each model."""
    for lines in zip(*(suite.lines for suite in suites), strict=True):
        yield from (_row(suite.model, line) for suite, line in zip(suites, lines, strict=True))


def _row(model: str, line: Line) -> str:
    record = line.probe or line.zero_shot
    protocol = {} if record is None else record["protocol"]
    cells = [
        line.title,
        line.metric,
        model,
        _figure(line.probe, line.metric),
        _figure(line.zero_shot, line.metric),
        str(protocol.get("train", "")),
        str(protocol.get("test", "")),
        f"`{protocol['split'][:12]}`" if protocol else "",
        "unknown" if line.seen is None else _describe_seen(line.seen),
    ]
    return f"| {' | '.join(cells)} |"


def _describe_seen(facts: dict[str, Any]) -> str:
    unknown = "; partly unknown" if facts["unknown"] else ""
    return f"{facts['images']} of {facts['of']}{unknown}"


def _figure(record: Record | None, metric: str) -> str:
    if record is None:
        return _NONE
    name = _name_of(record, metric)
    low, high = record["intervals"][name]
    return f"{100 * record['metrics'][name]:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _means_lines(suites: Sequence[Suite]) -> Iterator[str]:
    yield "| model | sets | probe, mean | ImageNet, probe |"
    yield "|---|---|---|---|"
    yield from (_mean_row(suite, "probe") for suite in suites)
    for model, mean, imagenet in PUBLISHED:
        yield f"| {model} | {len(AVERAGED)} | {mean} | {imagenet or _NONE} |"
    yield ""
    yield "| model | sets | zero-shot, mean | ImageNet, zero-shot |"
    yield "|---|---|---|---|"
    yield from (_mean_row(suite, "zero_shot") for suite in suites)
    for model, mean, imagenet in PUBLISHED_ZERO_SHOT:
        yield f"| {model} | 25 | {mean} | {imagenet} |"


def _mean_row(suite: Suite, kind: str) -> str:
    facts = means(suite)[kind]
    imagenet = next((_share(line, kind) for line in suite.lines if line.name == IMAGENET), None)
    shown = (
        _NONE if figure is None else f"{100 * figure:.1f}" for figure in (facts["mean"], imagenet)
    )
    return f"| {suite.model} | {facts['sets']} | {' | '.join(shown)} |"


def _reasons(suites: Sequence[Suite]) -> Iterator[str]:
    """Yields why results are missing; a reason that concerns all models is given once."""
    lines = [line for suite in suites for line in _reasons_of(suite)]
    yield from dict.fromkeys(lines)
    yield ""


def _reasons_of(suite: Suite) -> Iterator[str]:
    for line in suite.lines:
        if len(line.reasons) > 1 and len(set(line.reasons.values())) == 1:
            yield f"- {line.title}: {next(iter(line.reasons.values()))}"
        else:
            for kind, why in line.reasons.items():
                yield f"- {line.title}, no {kind} of {suite.model}: {why}"
