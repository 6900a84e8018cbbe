"""The rates of one machine, given or measured here, from which a plan follows."""

import time
from dataclasses import dataclass
from typing import Final

from mlcd.cores import available_cores
from mlcd.encoders.encoder import Encoder, job_batch
from mlcd.images.source import Source
from mlcd.parts.encoded import encode_entries

_MOST_TIMED: Final = 2048  # images


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The work of one machine in a second, and its price.

    images_per_s: decoded and encoded. image_bytes: of one image as it is read. products_per_s:
    floating-point operations of a scan of centers, two for each multiply-add. network_bytes_per_s:
    from the storage and between machines. hour_price: of a machine. month_price: of a GiB stored.
    train_images_per_s: of a training, without its centers; None where three of its passes take as
    long as three of those that embed.
    """

    images_per_s: float
    image_bytes: float
    products_per_s: float
    network_bytes_per_s: float
    hour_price: float | None = None
    month_price: float | None = None
    train_images_per_s: float | None = None


def measured_images(source: Source, encoder: Encoder) -> tuple[float, float]:
    """Returns the images a second that this machine decodes and encodes, and their mean bytes.

    The first images of the source are encoded as `mlcd embed` does; a batch before them warms up.
    """
    source.check_not_empty()
    entries = source.entries[:_MOST_TIMED]

    def encode(num: int) -> None:
        threads = available_cores()
        encode_entries(source, entries[:num], encoder, num_threads=threads, on_done=_ignore)

    encode(job_batch(encoder))
    began = time.perf_counter()
    encode(len(entries))
    seconds = time.perf_counter() - began
    return len(entries) / seconds, sum(entry.size_bytes for entry in entries) / len(entries)


def _ignore(done: int, errors: int) -> None:
    """Reports nothing: a measurement has no progress to show."""
