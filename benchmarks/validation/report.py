"""Tables and pictures from the raw numbers: rewrites the marked blocks of the report, and its PNG files.

    python -m benchmarks.validation.report [--tier cpu] [--results DIR] [--page FILE.md] [--assets DIR]

Nothing is run and nothing is typed by hand: a block stands between `<!-- validation: NAME -->` and
`<!-- /validation -->`, and holds what the numbers say now.
"""

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.validation.arms import CLUSTER_ARMS, INSTANCE_ARMS, UNTRAINED, Setting, Variant, default_setting
from benchmarks.validation.pictures import draw_cosines, draw_differences
from benchmarks.validation.plan import tuning
from benchmarks.validation.statistics import Interval, Values, in_points, interval, paired_difference
from benchmarks.validation.table import RESULTS, read
from benchmarks.validation.tiers import TIERS, Tier

_DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
_REFERENCES: Final = ("pixels", "mobilenet_v2", "resnet20")
_PRETRAIN: Final = "pretrain"
_OPPONENTS: Final = ("cd", "per_column", "mlc", *INSTANCE_ARMS)
_TITLES: Final = {
    "tiny_imagenet_30": "Tiny ImageNet, 30 classes",
    "cifar10_jpg": "CIFAR-10",
    "caltech101_20": "Caltech-101, 20 classes",
    "fashion_products": "fashion",
}
_NOT_RUN: Final = "Not run yet."
_METRICS: Final = {"knn": "k-NN", "linear_probe": "probe", "map": "mAP"}

Task = tuple[str, str, str]
"""set, task, metric."""
Runs = Mapping[Task, Mapping[int, float]]
"""Of one arm at one setting: values by task and seed."""
Differences = Mapping[str, Mapping[str, Interval]]
"""By title of the task, or of the mean of some, and by what is subtracted or from what."""


@dataclass(frozen=True)
class Numbers:
    """The rows of a tier's table."""

    tier: Tier
    rows: Sequence[dict[str, Any]]
    curves: Sequence[dict[str, Any]]

    @classmethod
    def read(cls, tier: Tier, folder: Path) -> "Numbers":
        return cls(tier, read(folder / f"{tier.name}.parquet"), read(folder / f"{tier.name}-curves.parquet"))

    def tasks(self) -> list[Task]:
        """In a fixed order; the pre-training set is no evaluation."""
        found = {(row["set"], row["task"], row["metric"]) for row in self.rows if row["set"] != _PRETRAIN}
        order = list(_METRICS)
        return sorted(found, key=lambda task: (order.index(task[2]), list(_TITLES).index(task[0]), task[1]))

    def reported(self, arm: str, setting: Setting | None) -> dict[Task, dict[int, float]]:
        """Of the reported runs of an arm at a setting (None: whatever it is), by task and seed."""
        found: dict[Task, dict[int, float]] = defaultdict(dict)
        for row in self.rows:
            if row["stage"] in ("report", "reference") and row["arm"] == arm and _has(row, setting):
                found[row["set"], row["task"], row["metric"]][row["seed"]] = row["value"]
        return found

    def tuned(self, arm: str) -> Setting | None:
        """What tuning chose; None before it is finished."""
        scores = {row["run"]: row["value"] for row in self.rows if row["set"] == _PRETRAIN}
        return tuning(self.tier, arm, scores)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=sorted(TIERS), default="cpu")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=_DOCS / "explanation" / "validation.md")
    parser.add_argument("--assets", type=Path, default=_DOCS / "assets")
    options = parser.parse_args()
    numbers = Numbers.read(TIERS[options.tier], options.results)
    options.page.write_text(filled(options.page.read_text(), numbers))
    if found := differences(numbers, _settings(numbers)):
        draw_differences(found, options.assets / "validation-differences.png")
    if curves := cosines(numbers):
        draw_cosines(curves, options.assets / "validation-cosines.png")


def filled(page: str, numbers: Numbers) -> str:
    """The page with every marked block made anew. Raises KeyError for a block that nobody makes."""
    blocks: dict[str, Callable[[Numbers], str]] = {
        "accuracy": accuracy_table,
        "differences": difference_table,
        "common": common_table,
        "untrained": untrained_table,
        "own": own_table,
        "tuning": tuning_table,
        "sweeps": sweep_table,
        "cosines": cosine_table,
        "runs": run_facts,
    }
    pattern = re.compile(r"<!-- validation: (\w+) -->\n.*?<!-- /validation -->", re.DOTALL)
    return pattern.sub(lambda found: _block(found[1], blocks[found[1]](numbers)), page)


def accuracy_table(numbers: Numbers) -> str:
    """Means over seeds, in percent."""
    if not numbers.tasks():
        return _NOT_RUN
    settings = _settings(numbers)
    arms = [UNTRAINED, *CLUSTER_ARMS, *INSTANCE_ARMS, *_REFERENCES]
    by_arm = {arm: numbers.reported(arm, settings.get(arm)) for arm in arms}
    header = ["", *(arm.replace("_", " ") for arm in arms)]
    seeds = ["seeds", *(_num_seeds(by_arm[arm]) for arm in arms)]
    rows = [[_title(task), *(_percent(by_arm[arm].get(task, {})) for arm in arms)] for task in numbers.tasks()]
    return _table([header, seeds, *rows])


def difference_table(numbers: Numbers) -> str:
    """MLCD minus each opponent, in points, and as a picture."""
    found = differences(numbers, _settings(numbers))
    picture = "![MLCD minus each other arm, with intervals](../assets/validation-differences.png)"
    return f"{_difference_rows(found, 'mlcd - {}')}\n\n{picture}" if found else _NOT_RUN


def common_table(numbers: Numbers) -> str:
    """The same where every arm has the recipe's setting."""
    return _difference_rows(differences(numbers, {arm: default_setting(arm) for arm in CLUSTER_ARMS}), "mlcd - {}")


def untrained_table(numbers: Numbers) -> str:
    """Each arm minus the untrained tower of the same seed."""
    settings, floor = _settings(numbers), numbers.reported(UNTRAINED, None)
    found = _paired(numbers, {arm: (numbers.reported(arm, setting), floor) for arm, setting in settings.items()})
    return _difference_rows(found, "{}")


def own_table(numbers: Numbers) -> str:
    """Each arm of clusters at its own setting minus itself at the common one, where the two differ."""
    settings = {arm: setting for arm, setting in _settings(numbers).items() if arm in CLUSTER_ARMS}
    pairs = {
        f"{arm}, {setting} - common": (numbers.reported(arm, setting), numbers.reported(arm, default_setting(arm)))
        for arm, setting in settings.items()
        if setting != default_setting(arm)
    }
    return _difference_rows(_paired(numbers, pairs), "{}")


def _difference_rows(found: Differences, header: str) -> str:
    if not found:
        return _NOT_RUN
    names = list(next(iter(found.values())))
    rows = [[title, *(in_points(by_name[name]) for name in names)] for title, by_name in found.items()]
    counts = sorted({str(interval.n) for by_name in found.values() for interval in by_name.values()})
    table = _table([["", *map(header.format, names)], *rows])
    return f"{table}\n\nn = {' or '.join(counts)} pairs of runs; bold: zero is outside, of four or more."


def differences(numbers: Numbers, settings: Mapping[str, Setting]) -> Differences:
    """MLCD minus each opponent that has run."""
    ours = numbers.reported("mlcd", settings["mlcd"])
    others = {arm: numbers.reported(arm, settings[arm]) for arm in _OPPONENTS if arm in settings}
    return _paired(numbers, {arm: (ours, theirs) for arm, theirs in others.items()})


def _paired(numbers: Numbers, pairs: Mapping[str, tuple[Runs, Runs]]) -> Differences:
    """First minus second of each pair: the means over tasks of a metric, then every task. Empty before there is one."""
    pairs = {name: pair for name, pair in pairs.items() if all(pair)}
    found: dict[str, dict[str, Interval]] = {}
    if not pairs:
        return found
    tasks = numbers.tasks()
    for metric in ("knn", "linear_probe"):
        of_metric = [task for task in tasks if task[2] == metric]
        found[f"mean of {len(of_metric)} tasks, {_METRICS[metric]}"] = {
            name: paired_difference(_mean(first, of_metric), _mean(second, of_metric))
            for name, (first, second) in pairs.items()
        }
    for task in tasks:
        found[_title(task)] = {
            name: paired_difference(first.get(task, {}), second.get(task, {}))
            for name, (first, second) in pairs.items()
        }
    return found


def tuning_table(numbers: Numbers) -> str:
    """Every tuning run, and what was chosen."""
    rows = [row for row in numbers.rows if row["stage"] == "tune"]
    if not rows:
        return _NOT_RUN
    lines = [["arm", "learning rate", "s", "r", "k-NN, held-out photographs", ""]]
    for row in sorted(rows, key=lambda row: ((*CLUSTER_ARMS, *INSTANCE_ARMS).index(row["arm"]), row["run"])):
        setting = json.loads(row["setting"])
        chosen = numbers.tuned(row["arm"])
        mark = "chosen" if chosen is not None and asdict(chosen) == setting else ""
        ratio = "" if setting["ratio"] is None else f"{setting['ratio']:g}"
        accuracy = f"{100 * row['value']:.1f}"
        lines.append([row["arm"], f"{setting['lr']:g}", f"{setting['scale']:g}", ratio, accuracy, mark])
    return _table(lines)


def sweep_table(numbers: Numbers) -> str:
    """Every sweep, beside the reported runs of the same seed that it changes."""
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    settings = _settings(numbers)
    for row in numbers.rows:
        standing = row["stage"] == "report" and row["arm"] in CLUSTER_ARMS and row["seed"] == numbers.tier.seeds[0]
        if row["stage"] == "sweep" or standing:
            runs[row["run"]].append(row)
    if not any(rows[0]["stage"] == "sweep" for rows in runs.values()):
        return _NOT_RUN
    lines = [["arm", "changed", "mean k-NN", "mean probe", "fashion mAP"]]
    for rows in sorted(runs.values(), key=lambda rows: CLUSTER_ARMS.index(rows[0]["arm"])):
        means = [_mean_of(rows, metric) for metric in _METRICS]
        lines.append([rows[0]["arm"], _changes(rows[0], numbers.tier, settings), *means])
    return _table(lines)


def cosine_table(numbers: Numbers) -> str:
    """Mean cosines at the end of training, over the seeds."""
    found = cosines(numbers)
    if not found:
        return _NOT_RUN
    lines = [["arm", "steps", "cos+", "cos-"]]
    for arm, curves in found.items():
        last = [curve[-1] for curve in curves]
        means = [statistics.mean(point[index] for point in last) for index in (1, 2)]
        lines.append([arm, str(int(last[0][0])), *(f"{mean:+.3f}" for mean in means)])
    picture = "![Mean cosine of positives and negatives over the steps](../assets/validation-cosines.png)"
    return f"{_table(lines)}\n\n{picture}"


def cosines(numbers: Numbers) -> dict[str, list[list[tuple[float, float, float]]]]:
    """Of MLC and MLCD: for every reported seed the points (step, positive cosine, negative cosine)."""
    settings = _settings(numbers)
    arm_of_run = {
        row["run"]: row["arm"]
        for row in numbers.rows
        if row["stage"] == "report" and row["arm"] in ("mlc", "mlcd") and _has(row, settings[row["arm"]])
    }
    curves: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for point in numbers.curves:
        if point["run"] in arm_of_run:
            curves[point["run"]].append((point["step"], point["positive_cosine"], point["negative_cosine"]))
    found: dict[str, list[list[tuple[float, float, float]]]] = defaultdict(list)
    for run in sorted(curves):
        found[arm_of_run[run]].append(sorted(curves[run]))
    return dict(sorted(found.items()))


def run_facts(numbers: Numbers) -> str:
    """What it was measured on, by what, in how long."""
    rows = list({row["run"]: row for row in numbers.rows}.values())
    if not rows:
        return _NOT_RUN
    reported = [row for row in rows if row["stage"] == "report" and row["arm"] != UNTRAINED]
    lines = [["stage", "runs", "steps", "minutes of one core each, training", "minutes by the clock"]]
    for stage in ("report", "tune", "sweep"):
        of_stage = [row for row in rows if row["stage"] == stage and row["arm"] != UNTRAINED]
        if of_stage:
            steps = "/".join(map(str, sorted({row["steps"] for row in of_stage})))
            lines.append(
                [stage, str(len(of_stage)), steps, *(_minutes(of_stage, name) for name in ("train_cpu_s", "train_s"))]
            )
    machines = sorted({f"{row['cpu']}, {row['cores']} cores, torch {row['torch']}" for row in reported})
    commits = sorted({row["commit"] for row in reported})
    return _table(lines) + f"\n\nHardware: {'; '.join(machines)}. Commits: {', '.join(commits)} (+: with changes)."


def _settings(numbers: Numbers) -> dict[str, Setting]:
    """Of each arm that trains: the tuned one once every seed of every arm of clusters has it, else the recipe's."""
    arms = (*CLUSTER_ARMS, *INSTANCE_ARMS)
    tuned = {arm: numbers.tuned(arm) for arm in arms}
    ready = all(
        tuned[arm] is not None and _num_seeds(numbers.reported(arm, tuned[arm])) == str(len(numbers.tier.seeds))
        for arm in CLUSTER_ARMS
    )
    return {arm: (tuned[arm] if ready else None) or default_setting(arm) for arm in arms}


def _has(row: dict[str, Any], setting: Setting | None) -> bool:
    return setting is None or json.loads(row["setting"]) == asdict(setting)


def _mean(by_task: Runs, tasks: Sequence[Task]) -> Values:
    """By seed, over the tasks, of the seeds that have all of them."""
    if not tasks:
        return {}
    seeds = set.intersection(*(set(by_task.get(task, {})) for task in tasks))
    return {seed: statistics.mean(by_task[task][seed] for task in tasks) for seed in seeds}


def _mean_of(rows: Sequence[dict[str, Any]], metric: str) -> str:
    values = [row["value"] for row in rows if row["metric"] == metric and row["set"] != _PRETRAIN]
    return f"{100 * statistics.mean(values):.1f}" if values else ""


def _changes(row: dict[str, Any], tier: Tier, settings: dict[str, Setting]) -> str:
    plain, setting = asdict(Variant()), asdict(settings[row["arm"]])
    variant = {name: value for name, value in json.loads(row["variant"]).items() if value != plain[name]}
    changed = {name: value for name, value in json.loads(row["setting"]).items() if value != setting[name]}
    steps = {} if row["steps"] == tier.steps else {"steps": row["steps"]}
    return ", ".join(f"{name} {value}" for name, value in {**changed, **variant, **steps}.items()) or "nothing"


def _num_seeds(by_task: dict[Task, dict[int, float]]) -> str:
    return "/".join(sorted({str(len(values)) for values in by_task.values()})) or "not run"


def _percent(by_seed: dict[int, float]) -> str:
    if not by_seed:
        return ""
    found = interval(list(by_seed.values()))
    digits = 1 if found.half_width < 0.02 else 0
    return f"{100 * found.mean:.{digits}f}"


def _minutes(rows: Sequence[dict[str, Any]], name: str) -> str:
    minutes = sorted(row[name] / 60 for row in rows)
    return f"{minutes[0]:.1f} to {minutes[-1]:.1f}"


def _title(task: Task) -> str:
    images, column, metric = task
    name = _TITLES[images] if images != "fashion_products" else f"fashion, {column}"
    return f"{name}, {_METRICS[metric]}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(_lines(rows))


def _lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    header, *body = rows
    yield "| " + " | ".join(header) + " |"
    yield "|---|" + "---:|" * (len(header) - 1)
    for row in body:
        yield "| " + " | ".join(row) + " |"


def _block(name: str, text: str) -> str:
    return f"<!-- validation: {name} -->\n\n{text}\n\n<!-- /validation -->"


if __name__ == "__main__":
    main()
