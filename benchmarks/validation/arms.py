"""What is compared: the arms, what is tuned for each, and one run of the study."""

import ast
import re
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, Self

from mlcd.errors import ConfigInvalid

Stage = Literal["tune", "report", "sweep"]

CLUSTER_ARMS: Final = ("cd", "per_column", "mlc", "mlcd")
INSTANCE_ARMS: Final = ("instance_softmax", "instance_sigmoid")
UNTRAINED: Final = "untrained"
_ARMS: Final = (*CLUSTER_ARMS, *INSTANCE_ARMS, UNTRAINED)

_NUMBER: Final = r"\d+(?:\.\d+)?(?:e-\d+)?"
_NAME: Final = re.compile(
    rf"(?P<stage>tune|report|sweep)/(?P<arm>{'|'.join(_ARMS)})-seed(?P<seed>\d+)"
    rf"-lr(?P<lr>{_NUMBER})-s(?P<scale>{_NUMBER})(?:-r(?P<ratio>{_NUMBER}))?-steps(?P<steps>\d+)(?P<variant>(?:-\w+=.+)?)"
)
_CHANGE: Final = re.compile(r"-(\w+)=(.+?)(?=-\w+=|$)")


@dataclass(frozen=True)
class Setting:
    """What is tuned. scale: s, for instance discrimination the initial inverse temperature. ratio: r, of clusters."""

    lr: float
    scale: float
    ratio: float | None

    def __str__(self) -> str:
        return f"lr{self.lr:g}-s{self.scale:g}" + (
            "" if self.ratio is None else f"-r{self.ratio:g}"
        )


@dataclass(frozen=True)
class Grid:
    """Tuned one after the other from the default on, each at the best so far: scale, rate, ratio."""

    scales: tuple[float, ...]
    rates: tuple[float, ...]
    ratios: tuple[float, ...]

    @property
    def num_runs(self) -> int:
        """The value that the search stands at is not run twice."""
        return len(self.scales) + len(self.rates) + len(self.ratios)


def default_setting(arm: str) -> Setting:
    """For clusters what the recipe `small` had before this study; where tuning starts, and what is taken without it."""
    return Setting(1e-3, 16.0, 1.0) if arm in CLUSTER_ARMS else Setting(1e-3, 10.0, None)


def grid(arm: str) -> Grid:
    """As many runs for every arm; `rates` and `ratios` are beside the default ones."""
    if arm in CLUSTER_ARMS:
        return Grid(scales=(8.0, 16.0, 32.0), rates=(2e-3,), ratios=(0.3,))
    return Grid(scales=(5.0, 10.0, 20.0, 40.0), rates=(2e-3,), ratios=())


@dataclass(frozen=True)
class Variant:
    """What a sweep changes; the defaults are the reported arms'."""

    clusters: int | None = None
    """None: the tier's."""
    features: str | None = None
    """Cluster the features of this built-in encoder; None: of the tier's."""
    labels: int = 8
    drawn_from: int | None = None
    """`labels` of so many nearest centers, drawn anew each time an image is seen; None: always the nearest."""
    threshold_mean: float | None = None
    """Labels by a threshold on the cosine that leaves so many per image on average, instead of the nearest `labels`."""
    margin_kind: Literal["arcface", "cosface", "none"] = "arcface"
    bias: float = 0.0
    embedding_dim: int | None = None
    """None: the tier's."""
    kmeans_centers: bool = False
    """Start the classifier from the centers of k-means; embedding_dim must be the encoder's."""

    def __str__(self) -> str:
        changed = [
            entry.name for entry in fields(self) if getattr(self, entry.name) != entry.default
        ]
        return "".join(f"-{name}={getattr(self, name)}" for name in changed)

    @classmethod
    def parse(cls, text: str) -> Self:
        """What `str` wrote."""
        changed: dict[str, Any] = {}
        for name, value in _CHANGE.findall(text):
            changed[name] = value
            with suppress(ValueError, SyntaxError):  # it is a word
                changed[name] = ast.literal_eval(value)
        return cls(**changed)


@dataclass(frozen=True)
class RunSpec:
    """One run. `name` tells all of it: what is finished under a name is never repeated."""

    stage: Stage
    arm: str
    seed: int
    setting: Setting
    steps: int
    variant: Variant = field(default=Variant())

    @property
    def name(self) -> str:
        return f"{self.stage}/{self.arm}-seed{self.seed}-{self.setting}-steps{self.steps}{self.variant}"

    @classmethod
    def parse(cls, name: str) -> Self:
        """The run of that name. Raises ConfigInvalid where no run has it."""
        unknown = ConfigInvalid(
            f"no run is called {name}", remedy="names stand in the column `run` of the results"
        )
        found = _NAME.fullmatch(name)
        if found is None or (found["ratio"] is not None) != (found["arm"] in CLUSTER_ARMS):
            raise unknown
        try:
            variant = Variant.parse(found["variant"])
        except TypeError:  # a change that no variant has
            raise unknown from None
        ratio = None if found["ratio"] is None else float(found["ratio"])
        setting = Setting(float(found["lr"]), float(found["scale"]), ratio)
        stage: Any = found["stage"]
        spec = cls(stage, found["arm"], int(found["seed"]), setting, int(found["steps"]), variant)
        if spec.name != name:  # the same number written in another way
            raise unknown
        return spec

    @property
    def num_labels(self) -> int:
        return 1 if self.arm == "cd" else self.variant.labels
