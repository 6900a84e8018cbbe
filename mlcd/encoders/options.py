"""What a user may say about how a model is opened: one list, from the command line to the worker."""

from dataclasses import dataclass

from mlcd.encoders.base import EngineName, Precision
from mlcd.images.decode import ExifPolicy
from mlcd.images.transform import DecodeMode


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """num_threads: 0 takes all cores that the process may use.

    exif, decode: other than the model's preprocessing says, which makes it a model of another
    fingerprint; None keeps what it says.
    """

    precision: Precision = "fp32"
    engine: EngineName = "auto"
    num_threads: int = 0
    exif: ExifPolicy | None = None
    decode: DecodeMode | None = None


DEFAULTS = EncoderOptions()
