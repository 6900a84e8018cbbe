"""The arms of the frozen tier: one for each setting of the loss that is compared."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Literal

from mlcd.training.head.partial_fc import HeadConfig
from studies.losses.frozen.features import TEACHERS
from studies.losses.instrument.trainable import trainable

FrozenKind = Literal["mlcd", "mlc", "cd", "per_column", "bce"]

NAMED_SEEDS: Final = tuple(range(1, 25))
SWEEP_SEEDS: Final = tuple(range(1, 9))
# More seeds, where the noise of an arm needs them for an interval of ± 0.15 points.
_NOISY: Final = {
    ("mobilenet", "CD"): range(25, 33),
    ("hog", "CD"): range(25, 65),
    ("hog", "per_column"): range(25, 41),
    ("resnet20", "CD"): range(25, 49),
}
_RATIOS: Final = (0.03, 0.1, 0.3)
_RATES: Final = (1 / 3, 3.0)
_SCALAR_RATES: Final = (1.0, 10.0, 100.0)
_SCALES: Final = (4.0, 8.0, 16.0, 32.0, 64.0)
BIASES: Final = (-8.0, -4.0, -2.0, 2.0, 4.0, 8.0)
_SEVERAL: Final[tuple[FrozenKind, ...]] = ("mlc", "mlcd")

FEATURES: Final = "features"

Start = Literal["random", "wide", "centers"]


@dataclass(frozen=True)
class Arm:
    """The settings that decide a run besides teacher and seed.

    learned: the scale and, in Eq. 5, the bias are learned; the bias starts at -log(r k / l).
    start: "centers" starts the classifier from those of k-means, so that the embedding is as wide
    as the features; "wide" starts one as wide from random rows of the same norm.
    rate: of learning, times that of the recipes. scalar_rate: that of scale and bias, times `rate`.
    """

    kind: FrozenKind = "mlcd"
    scale: float = 16.0
    bias: float = 0.0
    margin: float = 0.3
    labels: int = 8
    clusters: int = 1000
    ratio: float = 1.0
    steps: int = 300
    learned: bool = False
    start: Start = "random"
    rate: float = 1.0
    scalar_rate: float = 1.0

    @property
    def name(self) -> str:
        """Returns the kind and what differs from the defaults."""
        changed = [
            f"{entry.name}={_text(getattr(self, entry.name))}"
            for entry in fields(self)[1:]
            if getattr(self, entry.name) != entry.default
        ]
        return "-".join([self.kind, *changed])

    @property
    def first_bias(self) -> float:
        """Returns the bias that training begins with."""
        if not self.learned or self.kind != "mlcd":
            return self.bias
        return -math.log(self.ratio * self.clusters / self.labels)

    def head(self, seed: int) -> HeadConfig:
        """Returns the settings of the loss. Raises InvalidInput as `trainable` does."""
        return HeadConfig(
            kind=trainable(self.kind),
            scale=self.scale,
            margin=self.margin,
            bias=self.first_bias,
            learn_scale=self.learned,
            learn_bias=self.learned and self.kind == "mlcd",
            negative_ratio=self.ratio,
            seed=seed,
        )


@dataclass(frozen=True)
class FeaturesRun:
    """A teacher's features as they are, to see what a network makes of them."""

    teacher: str

    @property
    def name(self) -> str:
        return f"{self.teacher}/{FEATURES}"

    @property
    def fields(self) -> dict[str, Any]:
        return {"teacher": self.teacher, "arm": FEATURES, "seed": 0}


@dataclass(frozen=True)
class FrozenRun:
    """One run, fully described by its name."""

    teacher: str
    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        return f"{self.teacher}/{self.arm.name}/seed{self.seed}"

    @property
    def fields(self) -> dict[str, Any]:
        arm = {"arm": self.arm.name, "seed": self.seed, **asdict(self.arm)}
        return {"teacher": self.teacher, **arm}


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


WIDE: Final = Arm(start="wide")
FROM_CENTERS: Final = Arm(start="centers")
NAMED: Final = {
    "MLCD": Arm(),
    "MLC": Arm("mlc"),
    "CD": Arm("cd", labels=1),
    "per_column": Arm("per_column"),
    "MLCD(b = +4)": Arm(bias=4.0),
    "MLCD(b = -4)": Arm(bias=-4.0),
    "MLCD(b = -6)": Arm(bias=-6.0),
    "MLCD(b = -8)": Arm(bias=-8.0),
    # At the rate of the weights, 300 steps move s by a seventh and b by a tenth.
    "learned s and b": Arm(learned=True, scalar_rate=30.0),
}


def all_runs() -> Iterator[FrozenRun | FeaturesRun]:
    """Yields every run of the tier, the named hypotheses of the first teacher first."""
    for teacher in TEACHERS:
        yield FeaturesRun(teacher)
        for seed in NAMED_SEEDS:
            yield from (FrozenRun(teacher, arm, seed) for arm in NAMED.values())
    for (teacher, name), seeds in _NOISY.items():
        for seed in seeds:
            yield FrozenRun(teacher, NAMED[name], seed)
            if name == "CD":  # what both are compared with
                yield FrozenRun(teacher, NAMED["MLCD"], seed)
    swept = dict.fromkeys(arm for arm in sweeps() if arm not in NAMED.values())
    for teacher in TEACHERS:
        for seed in SWEEP_SEEDS:
            yield from (FrozenRun(teacher, arm, seed) for arm in swept)


def sweeps() -> Iterator[Arm]:
    """Yields the arms around the default one: scale, bias, margin, k, r, l, starts and rates."""
    for kind in ("cd", "per_column", "mlc", "mlcd", "bce"):
        default = _default(kind)
        yield from (replace(default, scale=scale) for scale in _SCALES)
    rare = -math.log(Arm().clusters / Arm().labels)  # where the trainer started this loss
    yield from (Arm("bce", scale=scale, bias=rare) for scale in _SCALES)
    for scale in (8.0, 16.0, 32.0):
        yield from (Arm(scale=scale, bias=bias) for bias in BIASES)
    for kind in ("cd", *_SEVERAL):
        yield from (replace(_default(kind), margin=margin) for margin in (0.0, 0.1, 0.5))
        changed: tuple[dict[str, Any], ...] = (
            *({"clusters": clusters} for clusters in (100, 300, 3000, 8000)),
            *({"ratio": ratio} for ratio in _RATIOS),
        )
        yield from (replace(_default(kind), **each) for each in changed)
    for kind in _SEVERAL:
        yield from (Arm(kind, labels=labels) for labels in (1, 2, 4, 16, 32))
    yield from (Arm("per_column", ratio=ratio) for ratio in _RATIOS)
    yield from (WIDE, FROM_CENTERS)
    for arm in (NAMED["MLCD"], NAMED["MLC"], NAMED["CD"], NAMED["per_column"], Arm(scale=8.0)):
        yield from (replace(arm, rate=rate) for rate in _RATES)
    yield from (Arm(learned=True, scalar_rate=rate) for rate in _SCALAR_RATES)
    # Do the losses rest at the end of 300 steps, or would more of them change the answer?
    yield from (replace(NAMED[name], steps=900) for name in ("MLCD", "MLC", "CD"))


def _default(kind: FrozenKind) -> Arm:
    return Arm(kind, labels=1) if kind == "cd" else Arm(kind)
