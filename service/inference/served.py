"""Describes how to open a served tower, and the tower that an engine's process has opened."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from mlcd.encoders.encoder import Encoder
from mlcd.encoders.options import DEFAULTS, EncoderOptions
from mlcd.encoders.text_encoder import Calibration, TextEncoder
from mlcd.images.transform import PreprocessSpec
from mlcd.service.log import Log
from mlcd.types import Fingerprint

if TYPE_CHECKING:  # only the server has settings, and Triton is an extra
    from mlcd.encoders.triton import TritonEncoder, TritonTextEncoder
    from mlcd.service.settings import Settings

Tower = Literal["images", "texts"]


@dataclass(frozen=True)
class ItemLayout:
    """Shape and dtype of one item: an image is uint8 [3, S, S], a text int64 [T]."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class EngineOptions:
    """The model and tower that an engine's process opens, and its logging.

    tower: image tower or text tower of the model. centers: path of the centers that label its
    embeddings, on `centers_device` (of torch) if they fit.
    """

    spec: str
    max_batch: int
    encoder: EncoderOptions = DEFAULTS
    log: Log = Log()  # noqa: RUF009 - frozen
    tower: Tower = "images"
    centers: str | None = None
    centers_device: str = "cuda"

    @classmethod
    def from_settings(
        cls, settings: "Settings", model: str, *, num_threads: int, tower: Tower = "images"
    ) -> "EngineOptions":
        """Returns the options. Copies centers at a URL first, which takes a while."""
        from mlcd.service.inference.find_model import find_centers  # only the server needs it

        centers = find_centers(settings, model) if tower == "images" else None
        return cls(
            model,
            max_batch=settings.max_batch,
            encoder=settings.encoder_options(num_threads),
            log=settings.log,
            tower=tower,
            centers=None if centers is None else str(centers),
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "log": self.log.model_dump()}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "EngineOptions":
        options = {"encoder": EncoderOptions(**fields["encoder"]), "log": Log(**fields["log"])}
        return cls(**{**fields, **options})


@dataclass(frozen=True, kw_only=True)
class ServedTower:
    """The facts about an encoder that an engine's process has opened.

    shortest_s: seconds of one item on a warm engine. longest_s: seconds of the first batch of
    `max_batch` items; for a slow engine, extrapolated from a smaller batch. labels_of: digest of
    the centers with which it labels its embeddings; None without.
    """

    name: str
    fingerprint: Fingerprint
    dimension: int
    engine: str
    precision: str
    max_batch: int
    shortest_s: float
    longest_s: float
    labels_of: str | None = None

    @property
    def item(self) -> ItemLayout:
        raise NotImplementedError

    def batch_within(self, seconds: float) -> int:
        """Returns the size of the largest batch that takes at most max(seconds, 2 * shortest_s),
        estimated from the times measured at start.
        """
        allowed_s = max(seconds, 2 * self.shortest_s)
        if self.longest_s <= allowed_s:
            return self.max_batch
        item_s = (self.longest_s - self.shortest_s) / (self.max_batch - 1)
        return 1 + int((allowed_s - self.shortest_s) / item_s)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class ServedEncoder(ServedTower):
    """The opened image tower."""

    preprocess: PreprocessSpec

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
    def item(self) -> ItemLayout:
        side = self.preprocess.crop
        return ItemLayout((3, side, side), np.dtype(np.uint8))

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

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "ServedEncoder":
        return cls(**{**fields, "preprocess": PreprocessSpec.from_dict(fields["preprocess"])})


@dataclass(frozen=True, kw_only=True)
class ServedTextEncoder(ServedTower):
    """The opened text tower.

    context_length: token ids of one text, including padding.
    """

    context_length: int
    calibration: Calibration

    @classmethod
    def of(
        cls,
        encoder: "TextEncoder | TritonTextEncoder",
        *,
        max_batch: int,
        shortest_s: float,
        longest_s: float,
    ) -> "ServedTextEncoder":
        return cls(
            name=encoder.name,
            fingerprint=encoder.fingerprint,
            dimension=encoder.dimension,
            engine=encoder.engine,
            precision=encoder.precision,
            max_batch=max_batch,
            shortest_s=shortest_s,
            longest_s=longest_s,
            context_length=encoder.tokenizer.context_length,
            calibration=encoder.calibration,
        )

    @property
    def item(self) -> ItemLayout:
        return ItemLayout((self.context_length,), np.dtype(np.int64))

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "ServedTextEncoder":
        return cls(**{**fields, "calibration": Calibration(**fields["calibration"])})


TOWERS: Final[dict[Tower, type[ServedEncoder] | type[ServedTextEncoder]]] = {
    "images": ServedEncoder,
    "texts": ServedTextEncoder,
}
