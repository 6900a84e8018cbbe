"""The user's options for opening a model: one list, from the command line to the worker."""

from dataclasses import dataclass

from mlcd.encoders.encoder import EngineName, Precision
from mlcd.images.decode import ExifPolicy
from mlcd.images.transform import DecodeMode


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """The options for opening a model.

    num_threads: 0 takes all cores that the process may use. exif, decode: replace those of the
    model's preprocessing, which makes it a model of another fingerprint; None keeps them.
    """

    precision: Precision = "fp32"
    engine: EngineName = "auto"
    num_threads: int = 0
    exif: ExifPolicy | None = None
    decode: DecodeMode | None = None


DEFAULTS = EncoderOptions()
