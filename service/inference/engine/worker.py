"""The engine's own process, which opens the encoder and encodes the batches in shared memory.

The server's messages are {"descriptor", "opening"}, then {"slot", "num"} for every batch. The
engine's are {"served"} once, then {"slot", "seconds"} for every batch, without seconds where the
batch failed.
"""

import logging
import time

import numpy as np

from mlcd.child import Message, Parent, serve_parent
from mlcd.encoders import open_encoder
from mlcd.encoders.encoder import Encoder
from mlcd.types import ImageBatch
from service.host.threads import limit_blas
from service.inference.engine.fake import FakeEncoder
from service.inference.engine.slots import Slots
from service.inference.served import Opening, ServedEncoder
from service.telemetry.logs import configure_logs, kinds

_log = logging.getLogger("mlcd.service")


def serve(order: Message, server: Parent) -> None:
    opening = Opening.from_dict(order["opening"])
    configure_logs(opening.log)
    limit_blas(opening.encoder.num_threads)
    encoder, served = _open(opening)
    crop, dimension = served.preprocess.crop, served.dimension
    slots = Slots(order["descriptor"], max_batch=opening.max_batch, crop=crop, dimension=dimension)
    server.send({"served": served.to_dict()})
    _encode_batches(encoder, slots, server)


def _open(opening: Opening) -> tuple[Encoder, ServedEncoder]:
    """Opens the encoder, and runs its smallest and largest batch to compile their kernels."""
    encoder = _open_encoder(opening)
    crop = encoder.preprocess.crop
    blank = np.zeros((opening.max_batch, 3, crop, crop), np.uint8)
    encoder.encode(blank[:1])
    served = ServedEncoder.of(
        encoder,
        max_batch=opening.max_batch,
        shortest_s=_seconds(encoder, blank[:1]),
        longest_s=_seconds(encoder, blank),
    )
    return encoder, served


def _seconds(encoder: Encoder, images: ImageBatch) -> float:
    started = time.perf_counter()
    encoder.encode(images)
    return time.perf_counter() - started


def _open_encoder(opening: Opening) -> Encoder:
    if opening.spec.startswith("fake:"):
        return FakeEncoder(opening.spec)
    return open_encoder(opening.spec, opening.encoder)


def _encode_batches(encoder: Encoder, slots: Slots, server: Parent) -> None:
    for request in server:
        slot, num = request["slot"], request["num"]
        started = time.perf_counter()
        try:
            slots.rows[slot, :num] = encoder.encode(slots.pixels[slot, :num])
        except Exception as error:  # noqa: BLE001 - the server must hear of every error
            # The text may quote what clients sent: the kinds of the error and its cause are enough.
            _log.error("the engine failed on %d images: %s", num, kinds(error))
            server.send({"slot": slot})
        else:
            server.send({"slot": slot, "seconds": time.perf_counter() - started})


if __name__ == "__main__":
    serve_parent(serve)
