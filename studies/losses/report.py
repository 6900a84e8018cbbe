"""Writes tables and pictures from the raw numbers into the report's marked blocks and PNG files.

    python -m studies.losses.report [--tier cpu] [--results DIR] [--page FILE.md]
                                           [--assets DIR]

Nothing is run and nothing is typed by hand. A block is between `<!-- validation: NAME -->` and
`<!-- /validation -->`, and contains the present numbers.
"""

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from studies.losses.arms import (
    CLUSTER_ARMS,
    INSTANCE_ARMS,
    UNTRAINED,
    Setting,
    Variant,
    default_setting,
)
from studies.losses.hardware import THEN
from studies.losses.marked import filled, table
from studies.losses.numbers import (
    AVERAGED,
    HELD_OUT,
    METRICS,
    PRETRAIN,
    Differences,
    Numbers,
    Runs,
    count_seeds,
    differences,
    paired,
    pairs_of_arms,
    title,
)
from studies.losses.pictures import draw_clusters, draw_cosines, draw_differences
from studies.losses.plan import FROM_KMEANS, FROM_RANDOM, LONGER
from studies.losses.references import MAJORITY
from studies.losses.statistics import MIN_PAIRS, in_points
from studies.losses.table import RESULTS
from studies.losses.tiers import TIERS, Tier

_DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
_PAGE: Final = _DOCS / "explanation" / "validation-first-study.md"
_REFERENCES: Final = (MAJORITY, "pixels", "mobilenet_v2", "resnet20")
# The last points of a curve, which has one for every tenth step; a single batch is too few to show
# its  end.
_LAST_POINTS: Final = 5
_NOTHING: Final = "nothing"
_NOT_RUN: Final = "Not run yet."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tier", choices=sorted(TIERS), default="cpu")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=_PAGE)
    parser.add_argument("--assets", type=Path, default=_DOCS / "assets")
    options = parser.parse_args()
    numbers = Numbers.read(TIERS[options.tier], options.results)
    options.page.write_text(filled_page(options.page.read_text(), numbers))
    if found := differences(numbers, numbers.settings()):
        draw_differences(found, options.assets / "validation-differences.png")
    if curves := numbers.cosines():
        draw_cosines(curves, options.assets / "validation-cosines.png")
    if numbers.has_sweeps:
        of_clusters = {
            f"mean {METRICS[metric]}": numbers.by_clusters(metric) for metric in AVERAGED
        }
        draw_clusters(of_clusters, options.assets / "validation-clusters.png")


def filled_page(page: str, numbers: Numbers) -> str:
    """Returns the page with every marked block made anew. Raises KeyError for an unknown block."""
    blocks: dict[str, Callable[[Numbers], str]] = {
        "accuracy": accuracy_table,
        "differences": difference_table,
        "pairs": pairs_table,
        "common": common_table,
        "untrained": untrained_table,
        "own": own_table,
        "tuning": tuning_table,
        "sweeps": sweep_table,
        "longer": longer_table,
        "longer_untrained": longer_untrained_table,
        "centers": centers_table,
        "cosines": cosine_table,
        "runs": run_facts,
    }
    makers = {name: partial(maker, numbers) for name, maker in blocks.items()}
    return filled(page, makers, "validation")


def accuracy_table(numbers: Numbers) -> str:
    """Returns means over seeds, in percent."""
    if not numbers.tasks():
        return _NOT_RUN
    settings = numbers.settings()
    arms = [UNTRAINED, *CLUSTER_ARMS, *INSTANCE_ARMS, *_REFERENCES]
    by_arm = {arm: numbers.reported(arm, settings.get(arm)) for arm in arms}
    header = ["", *(arm.replace("_", " ") for arm in arms)]
    seeds = ["seeds", *(_num_seeds(by_arm[arm]) for arm in arms)]
    rows = [
        [title(task), *(_percent(by_arm[arm].get(task, {})) for arm in arms)]
        for task in (*numbers.tasks(), HELD_OUT)
    ]
    return table([header, seeds, *rows])


def difference_table(numbers: Numbers) -> str:
    """Returns MLCD minus each opponent, in points, and as a picture."""
    found = differences(numbers, numbers.settings())
    picture = "![MLCD minus each other arm, with intervals](../assets/validation-differences.png)"
    return f"{_difference_rows(found, 'mlcd - {}')}\n\n{picture}" if found else _NOT_RUN


def pairs_table(numbers: Numbers) -> str:
    """Returns every arm against every other, in the means only."""
    found = pairs_of_arms(numbers)
    if not found:
        return _NOT_RUN
    titles = [
        title for title in found if title.startswith("mean of") or title.endswith(METRICS["map"])
    ]
    rows = [
        [name, *(in_points(found[title][name]) for title in titles)] for name in found[titles[0]]
    ]
    return table([["", *titles], *rows])


def common_table(numbers: Numbers) -> str:
    """Returns the same differences with the recipe's setting for every arm."""
    return _difference_rows(
        differences(numbers, {arm: default_setting(arm) for arm in CLUSTER_ARMS}), "mlcd - {}"
    )


def untrained_table(numbers: Numbers) -> str:
    """Returns each arm minus the untrained tower of the same seed."""
    settings, floor = numbers.settings(), numbers.reported(UNTRAINED, None)
    found = paired(
        numbers.tasks(),
        {arm: (numbers.reported(arm, setting), floor) for arm, setting in settings.items()},
    )
    return _difference_rows(found, "{}")


def own_table(numbers: Numbers) -> str:
    """Returns each arm of clusters at its own setting minus the common one, if the two differ."""
    settings = {arm: setting for arm, setting in numbers.settings().items() if arm in CLUSTER_ARMS}
    pairs = {
        f"{arm}, {setting} - common": (
            numbers.reported(arm, setting),
            numbers.reported(arm, default_setting(arm)),
        )
        for arm, setting in settings.items()
        if setting != default_setting(arm)
    }
    return _difference_rows(paired(numbers.tasks(), pairs), "{}")


def _difference_rows(found: Differences, header: str) -> str:
    if not found:
        return _NOT_RUN
    names = list(next(iter(found.values())))
    rows = [
        [task, *(in_points(by_name[name]) for name in names)] for task, by_name in found.items()
    ]
    lines = table([["", *map(header.format, names)], *rows])
    most = max(interval.n for by_name in found.values() for interval in by_name.values())
    if most < MIN_PAIRS:
        return f"{lines}\n\nn: pairs of runs; fewer than {MIN_PAIRS} have no interval."
    return f"{lines}\n\n{most} pairs of runs where no n is given. Bold: zero is outside."


def longer_table(numbers: Numbers) -> str:
    """Returns MLCD minus each other arm of clusters, when all train for longer."""
    runs = _longer(numbers)
    ours = runs.pop("mlcd")
    return _difference_rows(
        paired(numbers.tasks(), {arm: (ours, theirs) for arm, theirs in runs.items()}), "mlcd - {}"
    )


def longer_untrained_table(numbers: Numbers) -> str:
    """Returns each arm of clusters, trained for longer, minus its seed's untrained tower."""
    floor = numbers.reported(UNTRAINED, None)
    return _difference_rows(
        paired(numbers.tasks(), {arm: (r, floor) for arm, r in _longer(numbers).items()}), "{}"
    )


def _longer(numbers: Numbers) -> dict[str, Runs]:
    steps, settings = LONGER * numbers.tier.steps, numbers.settings()
    return {arm: numbers.swept(arm, settings[arm], steps, Variant()) for arm in CLUSTER_ARMS}


def centers_table(numbers: Numbers) -> str:
    """Returns MLCD from the centers of k-means minus from random ones."""
    setting, steps = numbers.settings()["mlcd"], numbers.tier.steps
    pair = (
        numbers.swept("mlcd", setting, steps, FROM_KMEANS),
        numbers.swept("mlcd", setting, steps, FROM_RANDOM),
    )
    return _difference_rows(paired(numbers.tasks(), {"k-means - random": pair}), "{}")


def tuning_table(numbers: Numbers) -> str:
    """Returns every tuning run, and the chosen setting."""
    rows = [row for row in numbers.rows if row["stage"] == "tune"]
    if not rows:
        return _NOT_RUN
    lines = [["arm", "learning rate", "s", "r", "k-NN, held-out photographs", ""]]
    for row in sorted(
        rows, key=lambda row: ((*CLUSTER_ARMS, *INSTANCE_ARMS).index(row["arm"]), row["run"])
    ):
        setting = json.loads(row["setting"])
        chosen = numbers.tuned(row["arm"])
        mark = "chosen" if chosen is not None and asdict(chosen) == setting else ""
        ratio = "" if setting["ratio"] is None else f"{setting['ratio']:g}"
        accuracy = f"{100 * row['value']:.1f}"
        lines.append(
            [row["arm"], f"{setting['lr']:g}", f"{setting['scale']:g}", ratio, accuracy, mark]
        )
    return table(lines)


def sweep_table(numbers: Numbers) -> str:
    """Returns every sweep's first seed, beside the reported runs that it changes and the untrained
    tower.
    """
    if not numbers.has_sweeps:
        return _NOT_RUN
    arms = (UNTRAINED, *CLUSTER_ARMS)
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    settings = numbers.settings()
    for row in numbers.rows:
        standing = row["stage"] == "report" and row["arm"] in arms
        if row["seed"] == numbers.tier.seeds[0] and (row["stage"] == "sweep" or standing):
            runs[row["run"]].append(row)
    lines = [["arm", "changed", "mean k-NN", "mean probe", "fashion mAP", "held out, k-NN"]]
    found = []
    for rows in runs.values():
        means = [
            _mean_of([row for row in rows if row["set"] != PRETRAIN], metric) for metric in METRICS
        ]
        held_out = _mean_of([row for row in rows if row["set"] == PRETRAIN], "knn")
        found.append([rows[0]["arm"], _changes(rows[0], numbers.tier, settings), *means, held_out])
    whole = table(
        [*lines, *sorted(found, key=lambda line: (arms.index(line[0]), _by_number(line[1])))]
    )
    return (
        f"{whole}\n\n![Accuracy of each arm by the number of "
        "clusters](../assets/validation-clusters.png)"
    )


def cosine_table(numbers: Numbers) -> str:
    """Returns the mean cosines at the end of training, over the seeds."""
    found = numbers.cosines()
    if not found:
        return _NOT_RUN
    lines = [["arm", "steps", "cos+", "cos-"]]
    for arm, curves in found.items():
        last = [point for curve in curves for point in curve[-_LAST_POINTS:]]
        means = [statistics.mean(point[index] for point in last) for index in (1, 2)]
        lines.append(
            [arm, f"{last[0][0]:.0f} to {last[-1][0]:.0f}", *(f"{mean:+.3f}" for mean in means)]
        )
    picture = (
        "![Mean cosine of positives and negatives over the steps](../assets/validation-cosines.png)"
    )
    return f"{table(lines)}\n\n{picture}"


def run_facts(numbers: Numbers) -> str:
    """Returns the machine, the programs and the time of the measurements."""
    rows = list({row["run"]: row for row in numbers.rows}.values())
    if not rows:
        return _NOT_RUN
    timed = ("train_cpu_s", "train_s", "evaluation_s")
    lines = [
        [
            "stage",
            "runs",
            "steps",
            "training, minutes of a core",
            "by the clock",
            "evaluation, by the clock",
        ]
    ]
    for stage in ("report", "tune", "sweep"):
        for arms, named in ((CLUSTER_ARMS, "clusters"), (INSTANCE_ARMS, "instances")):
            chosen = [row for row in rows if row["stage"] == stage and row["arm"] in arms]
            if chosen:
                steps = "/".join(map(str, sorted({row["steps"] for row in chosen})))
                minutes = (_minutes(chosen, name) for name in timed)
                lines.append([f"{stage}, {named}", str(len(chosen)), steps, *minutes])
    machines = sorted({f"{row['cpu']}, {row['cores']} cores, torch {row['torch']}" for row in rows})
    commits = sorted({commit for row in rows for commit in row["commit"].split(THEN)})
    return (
        table(lines)
        + f"\n\nHardware: {'; '.join(machines)}. Commits: {', '.join(commits)} (+: with changes)."
    )


def _mean_of(rows: Sequence[dict[str, Any]], metric: str) -> str:
    values = [row["value"] for row in rows if row["metric"] == metric]
    return f"{100 * statistics.mean(values):.1f}" if values else ""


def _changes(row: dict[str, Any], tier: Tier, settings: dict[str, Setting]) -> str:
    if row["arm"] == UNTRAINED:
        return ""
    plain, setting = asdict(Variant()), asdict(settings[row["arm"]])
    variant = {
        name: value for name, value in json.loads(row["variant"]).items() if value != plain[name]
    }
    changed = {
        name: value for name, value in json.loads(row["setting"]).items() if value != setting[name]
    }
    steps = {} if row["steps"] == tier.steps else {"steps": row["steps"]}
    return (
        ", ".join(f"{name} {value}" for name, value in {**changed, **variant, **steps}.items())
        or _NOTHING
    )


def _by_number(changes: str) -> list[tuple[bool, str | float]]:
    """Returns the key that sorts changes by name, then value; no change goes first."""
    words = [] if changes == _NOTHING else changes.replace(",", " ,").split()
    return [
        (True, float(word)) if re.fullmatch(r"-?[\d.]+", word) else (False, word) for word in words
    ]


def _num_seeds(runs: Runs) -> str:
    return "/".join(map(str, sorted(count_seeds(runs)))) or "not run"


def _percent(by_seed: Mapping[int, float]) -> str:
    if not by_seed:
        return ""
    return f"{100 * statistics.mean(by_seed.values()):.1f}"


def _minutes(rows: Sequence[dict[str, Any]], name: str) -> str:
    minutes = sorted(row[name] / 60 for row in rows)
    return f"{minutes[0]:.1f} to {minutes[-1]:.1f}"


if __name__ == "__main__":
    main()
