"""The options for opening a model, shared by the command line, the server and its workers."""

from dataclasses import dataclass, field
from typing import get_args

from mlcd.encoders.encoder import EngineName, Precision
from mlcd.images.decode import ExifPolicy
from mlcd.images.transform import DecodeMode


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """The options for opening a model. Fields with choices are also options of the commands.

    num_threads: number of threads; 0 means one per core that the process may use. exif, decode:
    replace the values of the model's preprocessing, which changes the fingerprint; None keeps them.
    endpoint_wait_s: longest wait in seconds for an endpoint that is away; None for its own.
    """

    precision: Precision = field(default="fp32", metadata={"choices": get_args(Precision)})
    engine: EngineName = field(default="auto", metadata={"choices": get_args(EngineName)})
    num_threads: int = 0
    exif: ExifPolicy | None = field(
        default=None,
        metadata={
            "choices": get_args(ExifPolicy),
            "help": "Override the model's preprocessing.",
        },
    )
    decode: DecodeMode | None = field(
        default=None,
        metadata={
            "choices": get_args(DecodeMode),
            "help": "fast: JPEG at a fraction of its size.",
        },
    )
    endpoint_wait_s: float | None = None


DEFAULTS = EncoderOptions()
