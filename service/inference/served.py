"""The served encoder as its process opened it, and how to open it again."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mlcd.encoders.encoder import Encoder
from mlcd.encoders.options import DEFAULTS, EncoderOptions
from mlcd.images.transform import PreprocessSpec
from mlcd.types import Fingerprint
from service.settings import Log

if TYPE_CHECKING:  # an extra
    from mlcd.encoders.triton import TritonEncoder


@dataclass(frozen=True)
class Opening:
    """The arguments of `mlcd.encoders.open_encoder` for the engine's process, and how to log."""

    spec: str
    max_batch: int
    encoder: EncoderOptions = DEFAULTS
    log: Log = Log()  # noqa: RUF009 - frozen

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "log": self.log.model_dump()}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Opening":
        options = {"encoder": EncoderOptions(**fields["encoder"]), "log": Log(**fields["log"])}
        return cls(**{**fields, **options})


@dataclass(frozen=True)
class ServedEncoder:
    """The encoder that the engine's process has opened, without its weights.

    shortest_s: seconds of one image on a warm engine. longest_s: seconds of the first batch of
    `max_batch` images.
    """

    name: str
    fingerprint: Fingerprint
    dimension: int
    engine: str
    precision: str
    preprocess: PreprocessSpec
    max_batch: int
    shortest_s: float
    longest_s: float

    @classmethod
    def of(
        cls,
        encoder: "Encoder | TritonEncoder",
        *,
        max_batch: int,
        shortest_s: float,
        longest_s: float,
    ) -> "ServedEncoder":
        return cls(
            name=encoder.name,
            fingerprint=encoder.fingerprint,
            dimension=encoder.dimension,
            engine=encoder.engine,
            precision=encoder.precision,
            preprocess=encoder.preprocess,
            max_batch=max_batch,
            shortest_s=shortest_s,
            longest_s=longest_s,
        )

    @property
    def labels(self) -> dict[str, str]:
        """The labels of metrics about the model."""
        return {
            "model": self.name,
            "fingerprint": self.fingerprint,
            "engine": self.engine,
            "precision": self.precision,
            "preprocess": str(self.preprocess.version),
        }

    def batch_within(self, seconds: float) -> int:
        """Returns the largest batch that takes at most `seconds`, or twice as long as one image.

        It is computed from the times measured at start.
        """
        allowed_s = max(seconds, 2 * self.shortest_s)
        if self.longest_s <= allowed_s:
            return self.max_batch
        each_s = (self.longest_s - self.shortest_s) / (self.max_batch - 1)
        return 1 + int((allowed_s - self.shortest_s) / each_s)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "ServedEncoder":
        return cls(**{**fields, "preprocess": PreprocessSpec.from_dict(fields["preprocess"])})
