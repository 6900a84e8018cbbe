"""The runs that are due, a pure function of the tier and of the finished runs.

First comes every arm of clusters at the recipe's setting, seed by seed, so that an early stop
leaves whole seeds. Then comes tuning, one round after the other for each arm. It uses a seed that
is not reported and held-out photographs of the pre-training set; no evaluation set is looked at.
Then comes every arm at its tuned setting (runs of the recipe's setting are not repeated); then the
sweep of k, on which defaults rest; then instance discrimination, which costs twice as much; then
the other sweeps, on the first reported seed. Last come the other seeds of two of them: longer
training, and the centers of k-means.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from studies.losses.arms import (
    CLUSTER_ARMS,
    INSTANCE_ARMS,
    UNTRAINED,
    RunSpec,
    Setting,
    Variant,
    default_setting,
    grid,
)
from studies.losses.tiers import Tier

# The k-NN accuracy of every finished run, by name, on the pre-training set's held-out photographs.
Scores = Mapping[str, float]

# The length of longer training, in multiples of the tier's steps.
LONGER: Final = 3
FROM_RANDOM: Final = Variant(embedding_dim=1280)
# These are as wide as the features of MOBILENET, so that the classifier can start at the centers.
FROM_KMEANS: Final = Variant(embedding_dim=1280, kmeans_centers=True)


def due(tier: Tier, scores: Scores) -> Iterator[RunSpec]:
    """Yields runs that are not finished and can start now, in the order of their start."""
    for spec in known(tier, scores):
        if spec.name not in scores:
            yield spec


def known(tier: Tier, scores: Scores) -> Iterator[RunSpec]:
    """Yields all runs that are known so far, finished or not, each once."""
    yield from {spec.name: spec for spec in _all_known(tier, scores)}.values()


def _all_known(tier: Tier, scores: Scores) -> Iterator[RunSpec]:
    for seed in tier.seeds:
        yield from (reported(tier, arm, seed, default_setting(arm)) for arm in CLUSTER_ARMS)
        yield RunSpec("report", UNTRAINED, seed, default_setting(UNTRAINED), 0)
    of_clusters = _tuned(tier, CLUSTER_ARMS, scores)
    yield from of_clusters.runs
    for seed in tier.seeds:
        yield from (
            reported(tier, arm, seed, setting) for arm, setting in of_clusters.chosen.items()
        )
    has_sweeps = tier.sweeps and len(of_clusters.chosen) == len(CLUSTER_ARMS)
    if has_sweeps:
        yield from sweep_of_clusters(tier, of_clusters.chosen)
    of_instances = _tuned(tier, INSTANCE_ARMS if tier.instances else (), scores)
    yield from of_instances.runs
    for seed in tier.seeds:
        yield from (
            reported(tier, arm, seed, setting) for arm, setting in of_instances.chosen.items()
        )
    if has_sweeps:
        yield from sweeps(tier, of_clusters.chosen)
        for seed in tier.seeds:
            yield from repeated(tier, of_clusters.chosen, seed)


@dataclass(frozen=True)
class _Tuned:
    """The state of tuning.

    runs: all that are known so far. chosen: the settings of arms whose tuning is finished.
    """

    runs: list[RunSpec]
    chosen: dict[str, Setting]


def _tuned(tier: Tier, arms: Sequence[str], scores: Scores) -> _Tuned:
    tuned = _Tuned([], {})
    for arm in arms:
        runs, setting = tuning(tier, arm, scores)
        tuned.runs.extend(runs)
        if setting is not None:
            tuned.chosen[arm] = setting
    return tuned


def reported(tier: Tier, arm: str, seed: int, setting: Setting) -> RunSpec:
    return RunSpec("report", arm, seed, setting, tier.steps)


def tuning(tier: Tier, arm: str, scores: Scores) -> tuple[list[RunSpec], Setting | None]:
    """Returns all tuning runs known so far, and the best setting once all are finished."""
    best = default_setting(arm)
    if tier.tune_steps == 0:
        return [], best
    known_runs: list[RunSpec] = []
    for candidates in _rounds(arm):
        specs = [
            RunSpec("tune", arm, tier.tune_seed, setting, tier.tune_steps)
            for setting in candidates(best)
        ]
        known_runs += specs
        if any(spec.name not in scores for spec in specs):
            return known_runs, None
        # Of equals the first wins: the present value comes before its replacement.
        standing = RunSpec("tune", arm, tier.tune_seed, best, tier.tune_steps)
        best = max([standing, *specs], key=lambda spec: scores[spec.name]).setting
    return known_runs, best


def _rounds(arm: str) -> Iterator[Callable[[Setting], list[Setting]]]:
    values = grid(arm)
    yield lambda best: [replace(best, scale=scale) for scale in values.scales]
    yield lambda best: [replace(best, lr=lr) for lr in values.rates]
    if values.ratios:
        yield lambda best: [replace(best, ratio=ratio) for ratio in values.ratios]


def sweep_of_clusters(tier: Tier, chosen: Mapping[str, Setting]) -> Iterator[RunSpec]:
    """Yields runs with a fifth and with four times as many clusters, at the tuned settings.

    `mlcd` also runs at the common setting, because the better one may depend on k.
    """
    for clusters in swept_clusters(tier):
        settings = [(arm, chosen[arm]) for arm in ("mlcd", "mlc", "cd", "per_column")]
        for arm, setting in dict.fromkeys([*settings, ("mlcd", default_setting("mlcd"))]):
            yield RunSpec(
                "sweep", arm, tier.seeds[0], setting, tier.steps, Variant(clusters=clusters)
            )


def swept_clusters(tier: Tier) -> tuple[int, int]:
    return tier.clusters // 5, tier.clusters * 4


def sweeps(tier: Tier, chosen: Mapping[str, Setting]) -> Iterator[RunSpec]:
    """Yields one change at a time to `mlcd`, except of k, at the tuned setting and with one seed.

    Then come all arms on features without supervision.
    """
    seed, base, common = tier.seeds[0], chosen["mlcd"], default_setting("mlcd")

    def changed(arm: str = "mlcd", setting: Setting | None = None, **variant: object) -> RunSpec:
        of_variant = Variant(**variant)  # type: ignore[arg-type]
        return RunSpec("sweep", arm, seed, setting or chosen[arm], tier.steps, of_variant)

    yield from (changed(labels=labels) for labels in (1, 2, 4, 16))
    of_ratios = (replace(base, ratio=ratio) for ratio in (0.1, 0.3, 1.0))
    of_scales = (replace(base, scale=scale) for scale in (4.0, 8.0, 16.0, 32.0, 64.0))
    of_a_million_classes = replace(base, scale=64.0, ratio=0.1)
    for setting in (*of_ratios, *of_scales, of_a_million_classes):
        # The others are reported.
        if setting not in (base, common):
            yield changed(setting=setting)
    yield changed(labels=16, threshold_mean=8.0)
    yield from (changed(arm, drawn_from=10) for arm in ("mlcd", "per_column"))
    yield from (changed(margin_kind=kind) for kind in ("none", "cosface"))
    yield from (changed(bias=bias) for bias in (-4.0, -8.0))
    yield from (changed(arm, features="hog") for arm in CLUSTER_ARMS)


def repeated(tier: Tier, chosen: Mapping[str, Setting], seed: int) -> Iterator[RunSpec]:
    """Yields the sweeps that have every seed.

    These are `mlcd` from the centers of k-means and from random ones, and every arm trained for
    longer.
    """
    for variant in (FROM_RANDOM, FROM_KMEANS):
        yield RunSpec("sweep", "mlcd", seed, chosen["mlcd"], tier.steps, variant)
    yield from (
        RunSpec("sweep", arm, seed, chosen[arm], LONGER * tier.steps) for arm in CLUSTER_ARMS
    )
