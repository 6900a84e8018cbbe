"""The runs of the towers tier, and their sizes on two CPU cores and on a GPU."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal

from studies.losses.instrument.trainable import trainable

TowerKind = Literal["mlcd", "mlc", "cd", "per_column", "instance_softmax", "instance_sigmoid"]

TOWER_TEACHERS: Final = ("mobilenet", "hog", "own")
NO_TEACHER: Final = "none"  # of instance discrimination
CARRIED_BIAS: Final = 4.0  # carried over from the prototype of E1; it decides names of runs
BIASED: Final = f"MLCD(b = {CARRIED_BIAS:+g})"
SCALED: Final = "MLCD(s = 8)"  # the scale that towers of the first study gained by
SAME_VIEWS: Final = "MLCD(views of instances)"
# Contrastive methods live on changes of color, blur and small crops (SimCLR, DINO).
_CONTRASTIVE_CHANGES: Final = (
    "augment.min_area=0.2",
    "augment.max_aspect=1.3333",
    "augment.brightness=0.4",
    "augment.contrast=0.4",
    "augment.saturation=0.2",
    "augment.hue=0.1",
    "augment.grayscale=0.2",
    "augment.blur=0.5",
    "augment.blur_sigma=[0.1, 1.0]",  # in pixels of a view of 64
)


@dataclass(frozen=True)
class TowerArm:
    """The settings of the loss of a run.

    scale: s; of instances, where the learned one begins. changed: images are changed as those of
    instance discrimination are, which always changes them.
    """

    kind: TowerKind = "mlcd"
    scale: float = 16.0
    bias: float = 0.0
    labels: int = 8
    ratio: float = 1.0
    changed: bool = False

    @property
    def name(self) -> str:
        """Returns the kind and what differs from the defaults."""
        changed = [
            f"{entry.name}={getattr(self, entry.name):g}"
            for entry in fields(self)[1:]
            if getattr(self, entry.name) != entry.default
        ]
        return "-".join([self.kind, *changed])

    @property
    def overrides(self) -> Iterator[str]:
        """Yields the changes of the recipe `small`. Raises InvalidInput as `trainable` does."""
        if self.changed:
            yield from _CONTRASTIVE_CHANGES
        yield f"loss.kind={trainable(self.kind)}"
        yield f"loss.labels_per_image={self.labels}"
        yield f"loss.scale={self.scale}"
        yield f"loss.negative_ratio={self.ratio}"
        if self.kind == "mlcd":
            yield f"loss.bias={self.bias}"


TOWER_ARMS: Final = {
    "MLCD": TowerArm(),
    "MLC": TowerArm("mlc"),
    "CD": TowerArm("cd", labels=1),
    BIASED: TowerArm(bias=CARRIED_BIAS),
    # All classes are negatives, so that the order of the label columns does not matter.
    "per_column": TowerArm("per_column"),
}
# Whether towers gain by another scale is asked of two teachers alone.
SCALED_ARMS: Final = {SCALED: TowerArm(scale=8.0)}
SCALED_TEACHERS: Final = ("mobilenet", "hog")
# Whether instance discrimination gains by its loss or by how its images are changed.
CHANGED_ARMS: Final = {SAME_VIEWS: TowerArm(changed=True)}
INSTANCE_ARMS: Final = {
    "softmax of instances": TowerArm("instance_softmax", scale=10.0),
    "sigmoid of instances": TowerArm("instance_sigmoid", scale=10.0),
}
_HEADLINE: Final = ("MLCD", "MLC", "CD", BIASED)
_NOISY: Final = ("MLCD", "CD")  # twelve seeds leave 0.4 points of error between them


@dataclass(frozen=True)
class TowerRun:
    """One run, fully described by its name."""

    teacher: str
    arm: TowerArm
    seed: int

    @property
    def name(self) -> str:
        return f"{self.teacher}/{self.arm.name}/seed{self.seed}"

    @property
    def fields(self) -> dict[str, Any]:
        arm = {"arm": self.arm.name, "seed": self.seed, **asdict(self.arm)}
        return {"teacher": self.teacher, **arm}


@dataclass(frozen=True)
class TowerSize:
    """All that decides a run besides teacher, arm and seed.

    overrides: changes of the recipe `small`. clusters: k. more_seeds: of MLCD and CD with clusters
    of MobileNetV2 alone.
    """

    overrides: tuple[str, ...] = ()
    steps: int = 480
    clusters: int = 1000
    image_size: int = 64
    num_threads: int = 1
    device: str = "cpu"
    seeds: tuple[int, ...] = tuple(range(1, 13))
    more_seeds: tuple[int, ...] = ()
    checkpoint_steps: int = 120


# The recipe's patch of 8 takes three times as long: twelve seeds of it would not fit in.
ON_CPU: Final = TowerSize(overrides=("model.patch_size=16",), more_seeds=tuple(range(13, 21)))
ON_GPU: Final = TowerSize(  # ViT-S/8; it was never run
    overrides=(
        "model.width=384",
        "model.depth=12",
        "model.heads=6",
        "model.mlp_width=1536",
        "model.embedding_dim=256",
        "schedule.batch_size=512",
        "compute.precision=bf16",
        "compute.deterministic=true",
        "optim.warmup_steps=200",
    ),
    steps=4000,
    num_threads=0,
    device="cuda",
    seeds=tuple(range(1, 31)),
    checkpoint_steps=250,
)


def first_round(seed: int) -> TowerRun:
    """Returns the run whose tower is the teacher `own` of a seed: no class was shown to it."""
    return TowerRun("hog", TOWER_ARMS["MLCD"], seed)


def all_tower_runs(size: TowerSize) -> Iterator[TowerRun]:
    """Yields every run, the headline arms of MobileNetV2 first, and each part seed by seed."""
    seeds = size.seeds
    for seed in seeds:
        yield from (TowerRun("mobilenet", TOWER_ARMS[name], seed) for name in _HEADLINE)
    rest = [TOWER_ARMS[name] for name in TOWER_ARMS if name not in _HEADLINE]
    for seed in seeds:
        yield from (
            TowerRun(teacher, arm, seed)
            for teacher in SCALED_TEACHERS
            for arm in SCALED_ARMS.values()
        )
        yield from (TowerRun("hog", TOWER_ARMS[name], seed) for name in _HEADLINE)
        yield from (TowerRun("own", TOWER_ARMS[name], seed) for name in _HEADLINE)
        yield from (TowerRun("mobilenet", arm, seed) for arm in (*rest, *CHANGED_ARMS.values()))
        yield from (TowerRun(NO_TEACHER, arm, seed) for arm in INSTANCE_ARMS.values())
    for seed in seeds:
        yield from (TowerRun(teacher, arm, seed) for teacher in ("hog", "own") for arm in rest)
    for seed in size.more_seeds:
        yield from (TowerRun("mobilenet", TOWER_ARMS[name], seed) for name in _NOISY)
