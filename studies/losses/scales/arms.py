"""The runs of the scales tier: Eq. 5 with learned scalars, and losses of pairs by batch size."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from mlcd.training.head.partial_fc import HeadConfig
from studies.losses.frozen.arms import NAMED_SEEDS, SWEEP_SEEDS
from studies.losses.scales.instance_head import InstanceConfig

SCALES_TEACHER: Final = "mobilenet"
BATCHES: Final = (32, 64, 128, 256, 512, 1024, 2048)
# The number of clusters and the first scale, of which one changes at a time.
_CROSS: Final = ((100, 16.0), (1000, 8.0), (1000, 16.0), (1000, 32.0), (8000, 16.0))
SCALAR_RATE: Final = 30.0
_CLIP_SCALE: Final = 1 / 0.07
_SIGLIP_SCALE: Final = 10.0

Learned = Literal["none", "bias", "both"]
FirstBias = Literal["zero", "rk", "rkl"]
PairKind = Literal["clip", "siglip"]


@dataclass(frozen=True)
class LearnedArm:
    """Eq. 5 with a scale and a bias that are fixed or learned.

    start: the first bias is 0, -log(r k) or -log(r k / l). scalar_rate: the rate of scale and bias,
    times that of the centers: at their own rate, 300 steps would move s by a seventh alone.
    """

    learned: Learned = "none"
    start: FirstBias = "zero"
    scale: float = 16.0
    clusters: int = 1000
    labels: int = 8
    ratio: float = 1.0
    margin: float = 0.3
    steps: int = 300
    rate: float = 1.0
    scalar_rate: float = SCALAR_RATE

    @property
    def name(self) -> str:
        bias = f"{self.learned}-{self.start}"
        return f"learned={bias}-scale={self.scale:g}-clusters={self.clusters}"

    @property
    def first_bias(self) -> float:
        """Returns the bias that training begins with."""
        negatives = self.ratio * self.clusters
        of_start = {"zero": 1.0, "rk": negatives, "rkl": negatives / self.labels}
        return 0.0 - math.log(of_start[self.start])

    def head(self, seed: int) -> HeadConfig:
        """Returns the settings of the loss."""
        return HeadConfig(
            kind="mlcd",
            scale=self.scale,
            margin=self.margin,
            bias=self.first_bias,
            learn_scale=self.learned == "both",
            learn_bias=self.learned != "none",
            negative_ratio=self.ratio,
            seed=seed,
        )


@dataclass(frozen=True)
class PairArm:
    """CLIP's or SigLIP's loss with learned scalars, at a batch size.

    samples: the pairs that a run sees, whatever its batch size. scalar_rate: the rate of scale and
    bias, times that of the weights, so that the 60 steps of the largest batch can move them.
    """

    kind: PairKind
    batch: int
    samples: int = 122_880
    scalar_rate: float = SCALAR_RATE

    @property
    def name(self) -> str:
        return f"{self.kind}-batch={self.batch}"

    @property
    def steps(self) -> int:
        return self.samples // self.batch

    @property
    def head(self) -> InstanceConfig:
        """Returns the settings of the loss; SigLIP's bias starts at -log of the negatives."""
        if self.kind == "clip":
            return InstanceConfig("instance_softmax", _CLIP_SCALE, learn_scale=True)
        bias = -math.log(self.batch - 1)
        return InstanceConfig("instance_sigmoid", _SIGLIP_SCALE, True, bias, True)


@dataclass(frozen=True)
class ScalesRun:
    """One run, fully described by its name."""

    arm: LearnedArm | PairArm
    seed: int

    @property
    def experiment(self) -> str:
        return "learned" if isinstance(self.arm, LearnedArm) else "pairs"

    @property
    def name(self) -> str:
        return f"{self.experiment}/{self.arm.name}/seed{self.seed}"

    @property
    def fields(self) -> dict[str, Any]:
        stated = {"experiment": self.experiment, "arm": self.arm.name, "seed": self.seed}
        return stated | asdict(self.arm) | {"steps": self.arm.steps}


NAMED_LEARNED: Final = {
    "fixed": LearnedArm(),
    "fixed at -log(r k / l)": LearnedArm("none", "rkl"),
    "learned from -log(r k)": LearnedArm("both", "rk"),
    "learned from -log(r k / l)": LearnedArm("both", "rkl"),
    "learned from 0": LearnedArm("both", "zero"),
}


def pair_arms() -> Iterator[PairArm]:
    """Yields both losses at every batch size."""
    for batch in BATCHES:
        yield from (PairArm("clip", batch), PairArm("siglip", batch))


def learned_arms() -> Iterator[LearnedArm]:
    """Yields what is fixed and learned over the number of clusters and the first scale."""
    of_bias: tuple[tuple[Learned, FirstBias], ...] = (
        ("none", "zero"), ("both", "rk"), ("both", "rkl"), ("both", "zero"), ("bias", "rk"),
        ("none", "rkl"),
    )  # fmt: skip
    for clusters, scale in _CROSS:
        for learned, start in of_bias:
            yield LearnedArm(learned, start, scale, clusters)


def all_scales_runs() -> Iterator[ScalesRun]:
    """Yields every run, the named hypotheses first, and each part seed by seed."""
    for seed in NAMED_SEEDS:
        yield from (ScalesRun(arm, seed) for arm in NAMED_LEARNED.values())
        yield from (ScalesRun(arm, seed) for arm in pair_arms())
    swept = [arm for arm in learned_arms() if arm not in NAMED_LEARNED.values()]
    for seed in SWEEP_SEEDS:
        yield from (ScalesRun(arm, seed) for arm in swept)
