"""The engine's process, which opens an encoder and encodes batches in shared memory.

The server sends {"descriptor", "options"}, then {"slot", "num", "rows", "top"} for every batch: the
number of items, of rows to label only, and of labels. The engine sends {"served"} once, then
{"slot", "seconds"} for every batch, without seconds if the batch failed.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlcd.child import Message, Parent, serve_parent
from mlcd.service.host.threads import limit_blas
from mlcd.service.inference.engine.labeling import DeviceCenters, open_centers_on_device
from mlcd.service.inference.engine.opening import open_images, open_texts
from mlcd.service.inference.engine.slots import Slots
from mlcd.service.inference.served import (
    EngineOptions,
    ServedEncoder,
    ServedTextEncoder,
    ServedTower,
)
from mlcd.service.telemetry.logs import configure_logs, kinds
from mlcd.service.timings import ENGINE_TRIAL_S
from mlcd.types import Embeddings

_log = logging.getLogger("mlcd.service")
_Encode: TypeAlias = Callable[[NDArray[Any]], Embeddings]
_TRIAL: Final = "a photo"


def serve(order: Message, server: Parent) -> None:
    options = EngineOptions.from_dict(order["options"])
    configure_logs(options.log)
    limit_blas(options.encoder.num_threads)
    encode, served = _open_images(options) if options.tower == "images" else _open_texts(options)
    centers = open_centers_on_device(options, served.engine)
    if centers is not None:
        served = replace(served, labels_of=centers.digest)
    slots = Slots(
        order["descriptor"],
        max_batch=options.max_batch,
        item=served.item,
        dimension=served.dimension,
    )
    server.send({"served": served.to_dict()})
    _encode_batches(encode, centers, slots, server)


def _open_images(options: EngineOptions) -> tuple[_Encode, ServedTower]:
    encoder = open_images(options)
    side = encoder.preprocess.crop
    times = _measure_batches(encoder.encode, np.zeros((options.max_batch, 3, side, side), np.uint8))
    return encoder.encode, ServedEncoder.of(encoder, max_batch=options.max_batch, **times)


def _open_texts(options: EngineOptions) -> tuple[_Encode, ServedTower]:
    encoder = open_texts(options)
    times = _measure_batches(encoder.encode, encoder.tokenizer([_TRIAL] * options.max_batch))
    return encoder.encode, ServedTextEncoder.of(encoder, max_batch=options.max_batch, **times)


def _measure_batches(encode: _Encode, largest: NDArray[Any]) -> dict[str, float]:
    """Measures the smallest and the largest batch of a warm encoder, and compiles their kernels.

    If the largest batch would take longer than ENGINE_TRIAL_S, measures a smaller batch and
    extrapolates.
    """
    shortest_s = _seconds(encode, largest[:1])
    num = min(len(largest), max(1, int(ENGINE_TRIAL_S / max(shortest_s, 1e-9))))
    longest_s = _seconds(encode, largest[:num]) * len(largest) / num
    return {"shortest_s": shortest_s, "longest_s": longest_s}


def _seconds(encode: _Encode, items: NDArray[Any]) -> float:
    started = time.perf_counter()
    encode(items)
    return time.perf_counter() - started


def _encode_batches(
    encode: _Encode, centers: DeviceCenters | None, slots: Slots, server: Parent
) -> None:
    for request in server:
        slot, num, top = request["slot"], request["num"], request["top"]
        total = num + request["rows"]
        started = time.perf_counter()
        try:
            if num:
                slots.rows[slot, :num] = encode(slots.items[slot, :num])
            slots.label_ids[slot, :total, :top] = (
                centers.label(slots.rows[slot, :total], top) if centers and top else -1
            )
        except Exception as error:  # noqa: BLE001 - the server must hear of every error
            # Not the error's text, which may quote clients' data: its type and cause are enough.
            _log.error("the engine failed on %d items: %s", num, kinds(error))
            server.send({"slot": slot})
        else:
            server.send({"slot": slot, "seconds": time.perf_counter() - started})


if __name__ == "__main__":
    serve_parent(serve)
