"""The arms of the study, the settings that are tuned for each, and one run."""

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
    rf"-lr(?P<lr>{_NUMBER})-s(?P<scale>{_NUMBER})(?:-r(?P<ratio>{_NUMBER}))?"
    r"-steps(?P<steps>\d+)(?P<variant>(?:-\w+=.+)?)"
)
_CHANGE: Final = re.compile(r"-(\w+)=(.+?)(?=-\w+=|$)")


@dataclass(frozen=True)
class Setting:
    """The tuned settings.

    scale: s; for instance discrimination the initial inverse temperature. ratio: r, of clusters.
    """

    lr: float
    scale: float
    ratio: float | None

    def __str__(self) -> str:
        return f"lr{self.lr:g}-s{self.scale:g}" + (
            "" if self.ratio is None else f"-r{self.ratio:g}"
        )


@dataclass(frozen=True)
class Grid:
    """The values of scale, rate and ratio, tuned one after the other from the default on.

    Each is tuned at the best values so far.
    """

    scales: tuple[float, ...]
    rates: tuple[float, ...]
    ratios: tuple[float, ...]

    @property
    def num_runs(self) -> int:
        """Returns the number of runs; the value at which the search stands is not run twice."""
        return len(self.scales) + len(self.rates) + len(self.ratios)


def default_setting(arm: str) -> Setting:
    """Returns the setting where tuning starts, and which is used without it.

    For clusters it is that of the recipe `small` before this study.
    """
    return Setting(1e-3, 16.0, 1.0) if arm in CLUSTER_ARMS else Setting(1e-3, 10.0, None)


def grid(arm: str) -> Grid:
    """Returns as many runs for every arm; `rates` and `ratios` are beside the default ones."""
    if arm in CLUSTER_ARMS:
        return Grid(scales=(8.0, 16.0, 32.0), rates=(2e-3,), ratios=(0.3,))
    return Grid(scales=(5.0, 10.0, 20.0, 40.0), rates=(2e-3,), ratios=())


@dataclass(frozen=True)
class Variant:
    """The settings that a sweep changes; the defaults are the reported arms'."""

    clusters: int | None = None
    """The number of clusters. None: the tier's."""
    features: str | None = None
    """The built-in encoder whose features are clustered. None: the tier's."""
    labels: int = 8
    drawn_from: int | None = None
    """The number of nearest centers that `labels` are drawn from, anew each time an image is seen.
    None: always the nearest.
    """
    threshold_mean: float | None = None
    """The mean number of labels per image, by a threshold on the cosine, instead of the nearest
    `labels`.
    """
    margin_kind: Literal["arcface", "cosface", "none"] = "arcface"
    bias: float = 0.0
    embedding_dim: int | None = None
    """The dimension of embeddings. None: the tier's."""
    kmeans_centers: bool = False
    """Starts the classifier from the centers of k-means; embedding_dim must be the encoder's."""

    def __str__(self) -> str:
        changed = [
            entry.name for entry in fields(self) if getattr(self, entry.name) != entry.default
        ]
        return "".join(f"-{name}={getattr(self, name)}" for name in changed)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the text that `str` wrote."""
        changed: dict[str, Any] = {}
        for name, value in _CHANGE.findall(text):
            changed[name] = value
            # A value that is not a literal is a word.
            with suppress(ValueError, SyntaxError):
                changed[name] = ast.literal_eval(value)
        return cls(**changed)


@dataclass(frozen=True)
class RunSpec:
    """One run, fully described by `name`; a name that is finished is never repeated."""

    stage: Stage
    arm: str
    seed: int
    setting: Setting
    steps: int
    variant: Variant = field(default=Variant())

    @property
    def name(self) -> str:
        run = f"{self.arm}-seed{self.seed}-{self.setting}-steps{self.steps}{self.variant}"
        return f"{self.stage}/{run}"

    @classmethod
    def parse(cls, name: str) -> Self:
        """Returns the run of that name. Raises ConfigInvalid if no run has it."""
        unknown = ConfigInvalid(
            f"no run is called {name}", remedy="names stand in the column `run` of the results"
        )
        found = _NAME.fullmatch(name)
        if found is None or (found["ratio"] is not None) != (found["arm"] in CLUSTER_ARMS):
            raise unknown
        # The change is one that no variant has.
        try:
            variant = Variant.parse(found["variant"])
        except TypeError:
            raise unknown from None
        ratio = None if found["ratio"] is None else float(found["ratio"])
        setting = Setting(float(found["lr"]), float(found["scale"]), ratio)
        stage: Any = found["stage"]
        spec = cls(stage, found["arm"], int(found["seed"]), setting, int(found["steps"]), variant)
        # The same number is written in another way.
        if spec.name != name:
            raise unknown
        return spec

    @property
    def num_labels(self) -> int:
        return 1 if self.arm == "cd" else self.variant.labels
