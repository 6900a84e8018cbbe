"""An engine in this process, and what is needed to stand a pipeline on it."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mlcd.errors import Unavailable
from mlcd.images.decode import DecodeLimits
from mlcd.images.transform import PreprocessSpec
from mlcd.service.inference.admission import Admission, Capacity, Places
from mlcd.service.inference.batcher import MicroBatcher
from mlcd.service.inference.engine.process import EngineFailed, Inference
from mlcd.service.inference.pipeline import Pipeline
from mlcd.service.telemetry.metrics import Metrics


class LocalEngine:
    """The `Engine` protocol with a fixed latency, one batch at a time; `batches` are the values
    seen in each.
    """

    labels_of = None

    def __init__(self, latency_s=0.02):
        self.latency_s, self.failing, self.batches = latency_s, False, []
        self._turn = asyncio.Lock()
        self._up = asyncio.Event()
        self._up.set()
        self.given = 0
        self.most_given = 0

    @property
    def up(self):
        return self._up.is_set()

    def end(self):
        self._up.clear()

    def start(self):
        self._up.set()

    async def wait_up(self):
        await self._up.wait()

    async def encode(self, batch):
        if not self.up:
            raise Unavailable("down")
        images = batch.items
        self.given += 1
        self.most_given = max(self.most_given, self.given)
        try:
            async with self._turn:
                await asyncio.sleep(self.latency_s)
                if self.failing:
                    raise EngineFailed("the engine failed")
                self.batches.append([int(image[0, 0, 0]) for image in images])
                rows = np.stack([image[:, 0, 0].astype(np.float32) for image in images])
                return Inference(rows, self.latency_s, np.zeros((len(rows), 0), np.int32))
        finally:
            self.given -= 1


def picture(value):
    return np.full((3, 4, 4), value, np.uint8)


def new_metrics():
    return Metrics(model="fake", fingerprint="f", engine="fake", precision="fp32", preprocess="1")


def sample(metrics, name):
    """The value of one line of the exposition, 0 where it is not there yet."""
    lines = (line.rpartition(" ") for line in metrics.exposition().decode().splitlines())
    return next((float(value) for found, _, value in lines if found == name), 0.0)


def new_batcher(engine, metrics=None, **options):
    return MicroBatcher(
        engine, **({"max_batch": 8, "max_queued": 100} | options), metrics=metrics or new_metrics()
    )


def new_admission(metrics=None, *, max_images=100, max_texts=100, **most):
    """most: of pixels, bytes, answers and streams, each of which one owner may hold all of."""
    metrics = metrics or new_metrics()
    units = {"pixels": 10**9, "bytes": 10**6, "answers": 10**6, "streams": 10} | most
    capacities = {
        of: Capacity(of, num, min_per_owner=num, metrics=metrics) for of, num in units.items()
    }
    images = Places("images", max_images, metrics=metrics)
    texts = Places("texts", max_texts, metrics=metrics, in_turn=True)
    return Admission(images=images, texts=texts, **capacities)


def new_pipeline(
    engine,
    batcher,
    metrics=None,
    *,
    headers=None,
    decoders=None,
    large=None,
    admission=None,
    **options,
):
    pool = decoders or ThreadPoolExecutor(2)
    settings = {"limits": DecodeLimits(), "max_pixels": 10**9, "num_decoders": 2} | options
    return Pipeline(
        engine,
        batcher,
        admission or new_admission(metrics),
        headers=headers or pool,
        decoders=pool,
        large=large or pool,
        preprocess=PreprocessSpec(4, 4),
        dimension=3,
        metrics=metrics or new_metrics(),
        **settings,
    )


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 20))


async def until(condition, timeout_s=10):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        await asyncio.sleep(0.001)
