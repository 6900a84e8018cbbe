"""The raw numbers of a tier by arm, task and seed, and the differences between pairs of arms."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from studies.losses.arms import (
    CLUSTER_ARMS,
    INSTANCE_ARMS,
    UNTRAINED,
    RunSpec,
    Setting,
    Variant,
    default_setting,
)
from studies.losses.plan import swept_clusters, tuning
from studies.losses.statistics import Interval, Values, paired_difference
from studies.losses.table import read
from studies.losses.tiers import Tier

PRETRAIN: Final = "pretrain"
# Settings are chosen by this measure. It is no evaluation: its classes are those of training.
HELD_OUT: Final = (PRETRAIN, "class", "knn")
METRICS: Final = {"knn": "k-NN", "linear_probe": "probe", "map": "mAP"}
# These metrics are averaged over tasks; there is only one task of mAP.
AVERAGED: Final = ("knn", "linear_probe")
_OPPONENTS: Final = ("cd", "per_column", "mlc", *INSTANCE_ARMS)
_TITLES: Final = {
    "tiny_imagenet_30": "Tiny ImageNet, 30 classes",
    "cifar10_jpg": "CIFAR-10",
    "caltech101_20": "Caltech-101, 20 classes",
    "fashion_products": "fashion",
    PRETRAIN: "pre-training's classes, photographs held out",
}

# The set, the task and the metric.
Task = tuple[str, str, str]
# The values of one arm at one setting, by task and seed.
Runs = Mapping[Task, Mapping[int, float]]
# The differences by title of the task (or of a mean of tasks), and by the other arm.
Differences = Mapping[str, Mapping[str, Interval]]
# The step, the positive cosine and the negative one.
Curve = list[tuple[float, float, float]]


@dataclass(frozen=True)
class Numbers:
    """The rows of a tier's table."""

    tier: Tier
    rows: Sequence[dict[str, Any]]
    curves: Sequence[dict[str, Any]]

    @classmethod
    def read(cls, tier: Tier, folder: Path) -> "Numbers":
        return cls(
            tier,
            read(folder / f"{tier.name}.parquet"),
            read(folder / f"{tier.name}-curves.parquet"),
        )

    def tasks(self) -> list[Task]:
        """The tasks in a fixed order; the pre-training set is no evaluation."""
        found = {
            (row["set"], row["task"], row["metric"]) for row in self.rows if row["set"] != PRETRAIN
        }
        order = list(METRICS)
        return sorted(
            found, key=lambda task: (order.index(task[2]), list(_TITLES).index(task[0]), task[1])
        )

    def reported(self, arm: str, setting: Setting | None) -> dict[Task, dict[int, float]]:
        """Returns the reported runs of an arm at a setting (None: any), by task and seed."""
        return _by_task(
            row
            for row in self.rows
            if row["stage"] in ("report", "reference") and row["arm"] == arm and _has(row, setting)
        )

    def swept(
        self, arm: str, setting: Setting, steps: int, variant: Variant
    ) -> dict[Task, dict[int, float]]:
        """Returns the sweep's runs that differ in their seed alone, by task and seed."""
        names = {
            RunSpec("sweep", arm, seed, setting, steps, variant).name for seed in self.tier.seeds
        }
        return _by_task(row for row in self.rows if row["run"] in names)

    def tuned(self, arm: str) -> Setting | None:
        """Returns the setting that tuning chose; None before it is finished."""
        scores = {row["run"]: row["value"] for row in self.rows if row["set"] == PRETRAIN}
        return tuning(self.tier, arm, scores)[1]

    def settings(self) -> dict[str, Setting]:
        """Returns the setting of each arm that trains.

        It is the tuned one once every seed of every arm of clusters has it, else the recipe's.
        """
        arms = (*CLUSTER_ARMS, *INSTANCE_ARMS)
        tuned = {arm: self.tuned(arm) for arm in arms}
        ready = all(self._has_every_seed(arm, tuned[arm]) for arm in CLUSTER_ARMS)
        return {arm: (tuned[arm] if ready else None) or default_setting(arm) for arm in arms}

    def _has_every_seed(self, arm: str, setting: Setting | None) -> bool:
        return setting is not None and count_seeds(self.reported(arm, setting)) == {
            len(self.tier.seeds)
        }

    @property
    def has_sweeps(self) -> bool:
        return any(row["stage"] == "sweep" for row in self.rows)

    def by_clusters(self, metric: str) -> dict[str, dict[int, float]]:
        """Returns the mean over the metric's tasks, of the first seed, by arm and number of
        clusters.

        The arms are the untrained tower, whose value is the same for each number, and each arm of
        clusters, as far as they were run.
        """
        tasks = [task for task in self.tasks() if task[2] == metric]
        first, numbers = (
            self.tier.seeds[0],
            sorted((self.tier.clusters, *swept_clusters(self.tier))),
        )
        found: dict[str, dict[int, float]] = {}
        for arm in (UNTRAINED, *CLUSTER_ARMS):
            means = {
                clusters: _mean(self._of_clusters(arm, clusters), tasks) for clusters in numbers
            }
            found[arm] = {
                clusters: by_seed[first] for clusters, by_seed in means.items() if first in by_seed
            }
        return found

    def _of_clusters(self, arm: str, clusters: int) -> Runs:
        setting = None if arm == UNTRAINED else self.settings()[arm]
        if setting is None or clusters == self.tier.clusters:
            return self.reported(arm, setting)
        return self.swept(arm, setting, self.tier.steps, Variant(clusters=clusters))

    def cosines(self) -> dict[str, list[Curve]]:
        """Returns the curves of MLC and MLCD, one for every reported seed."""
        settings = self.settings()
        arm_of_run = {
            row["run"]: row["arm"]
            for row in self.rows
            if row["stage"] == "report"
            and row["arm"] in ("mlc", "mlcd")
            and _has(row, settings[row["arm"]])
        }
        curves: dict[str, Curve] = defaultdict(list)
        for point in self.curves:
            if point["run"] in arm_of_run:
                curves[point["run"]].append(
                    (point["step"], point["positive_cosine"], point["negative_cosine"])
                )
        found: dict[str, list[Curve]] = defaultdict(list)
        for run in sorted(curves):
            found[arm_of_run[run]].append(sorted(curves[run]))
        return dict(sorted(found.items()))


def title(task: Task) -> str:
    images, column, metric = task
    name = _TITLES[images] if images != "fashion_products" else f"fashion, {column}"
    return f"{name}, {METRICS[metric]}"


def count_seeds(runs: Runs) -> set[int]:
    """Returns how many seeds the tasks have; empty if nothing was run."""
    return {len(values) for values in runs.values()}


def pairs_of_arms(numbers: Numbers) -> Differences:
    """Returns each arm minus each one before it, at their own settings."""
    arms = {arm: numbers.reported(arm, setting) for arm, setting in numbers.settings().items()}
    names = list(arms)
    pairs = [(first, second) for index, first in enumerate(names) for second in names[:index]]
    return paired(
        numbers.tasks(),
        {f"{first} - {second}": (arms[first], arms[second]) for first, second in pairs},
    )


def differences(numbers: Numbers, settings: Mapping[str, Setting]) -> Differences:
    """Returns MLCD minus each opponent that has run."""
    ours = numbers.reported("mlcd", settings["mlcd"])
    others = {arm: numbers.reported(arm, settings[arm]) for arm in _OPPONENTS if arm in settings}
    return paired(numbers.tasks(), {arm: (ours, theirs) for arm, theirs in others.items()})


def paired(tasks: Sequence[Task], pairs: Mapping[str, tuple[Runs, Runs]]) -> Differences:
    """Returns first minus second of each pair, and is empty before there is a pair.

    The means over tasks of a metric come first, then every task and the measure that chooses
    settings.
    """
    pairs = {name: pair for name, pair in pairs.items() if all(pair)}
    found: dict[str, dict[str, Interval]] = {}
    if not pairs:
        return found
    for metric in AVERAGED:
        of_metric = [task for task in tasks if task[2] == metric]
        found[f"mean of {len(of_metric)} tasks, {METRICS[metric]}"] = {
            name: paired_difference(_mean(first, of_metric), _mean(second, of_metric))
            for name, (first, second) in pairs.items()
        }
    for task in (*tasks, HELD_OUT):
        found[title(task)] = {
            name: paired_difference(first.get(task, {}), second.get(task, {}))
            for name, (first, second) in pairs.items()
        }
    return found


def _by_task(rows: Iterable[dict[str, Any]]) -> dict[Task, dict[int, float]]:
    """Returns values by task and seed."""
    found: dict[Task, dict[int, float]] = defaultdict(dict)
    for row in rows:
        found[row["set"], row["task"], row["metric"]][row["seed"]] = row["value"]
    return found


def _has(row: dict[str, Any], setting: Setting | None) -> bool:
    return setting is None or json.loads(row["setting"]) == asdict(setting)


def _mean(by_task: Runs, tasks: Sequence[Task]) -> Values:
    """Returns the mean over the tasks by seed, for the seeds that have all of them."""
    if not tasks:
        return {}
    seeds = set.intersection(*(set(by_task.get(task, {})) for task in tasks))
    return {seed: statistics.mean(by_task[task][seed] for task in tasks) for seed in seeds}
