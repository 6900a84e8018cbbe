"""The engine's own process, which opens the encoder and encodes the batches in shared memory.

Standard input brings lines of JSON: the `Opening`, then {"slot", "num"} for every batch. Standard
output takes {"served"} once, then {"slot", "seconds"} for every batch, or {"error", "message",
"remedy"}. The end of standard input means that the server is gone.
"""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mlcd.encoders import open_encoder
from mlcd.encoders.encoder import Encoder
from mlcd.errors import MlcdError
from mlcd.types import ImageBatch
from service.host.children import heed_parent_alone
from service.host.threads import limit_blas
from service.inference.engine.fake import FakeEncoder
from service.inference.engine.slots import Slots
from service.inference.served import Opening, ServedEncoder
from service.telemetry.logs import configure_logs, kinds

_log = logging.getLogger("mlcd.service")
_Send = Callable[[dict[str, Any]], None]


def main() -> None:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    heed_parent_alone(parent, at_its_end=signal.SIGKILL)
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of libraries must not mix with messages

    def send(message: dict[str, Any]) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    line = sys.stdin.readline()
    if not line:  # the server stopped while this process started
        return
    opening = Opening.from_json(line)
    configure_logs(opening.log)
    limit_blas(opening.encoder.num_threads)
    try:
        encoder, served = _open(opening)
    except MlcdError as error:
        send({"error": type(error).__name__, "message": error.message, "remedy": error.remedy})
        return
    crop, dimension = served.preprocess.crop, served.dimension
    slots = Slots(descriptor, max_batch=opening.max_batch, crop=crop, dimension=dimension)
    send({"served": served.to_dict()})
    _encode_batches(encoder, slots, sys.stdin, send)


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


def _encode_batches(encoder: Encoder, slots: Slots, lines: Iterable[str], send: _Send) -> None:
    for line in lines:
        request = json.loads(line)
        slot, num = request["slot"], request["num"]
        started = time.perf_counter()
        try:
            slots.rows[slot, :num] = encoder.encode(slots.pixels[slot, :num])
        except Exception as error:  # noqa: BLE001 - the server must hear of every error
            # The text may quote what clients sent: the kinds of the error and its cause are enough.
            _log.error("the engine failed on %d images: %s", num, kinds(error))
            send({"slot": slot, "error": True})
        else:
            send({"slot": slot, "seconds": time.perf_counter() - started})


if __name__ == "__main__":
    main()
