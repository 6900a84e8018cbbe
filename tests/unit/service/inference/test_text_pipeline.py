import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from mlcd.errors import DeadlineExceeded, Overloaded, TextRejected, Unavailable
from mlcd.service.inference import text_pipeline
from mlcd.service.inference.engine.fake import fake_tokenizer
from mlcd.service.inference.engine.process import Inference
from mlcd.service.inference.text_pipeline import TextPipeline, TextReader, num_chars
from tests.unit.service.engines import LocalEngine, new_admission, new_batcher, new_metrics

TOKENIZER = fake_tokenizer("fake:text=true")


class TextEngine(LocalEngine):
    """Its rows are the first three ids of each text; a text of zeros has no direction."""

    served = SimpleNamespace(dimension=3)

    async def encode(self, batch):
        if not self.up:
            raise Unavailable("down")
        self.batches.append(len(batch))
        await asyncio.sleep(self.latency_s)
        rows = np.stack([item[:3].astype(np.float32) for item in batch.items])
        return Inference(rows, 0.01, np.zeros((len(rows), 0), np.int32))


def ids_of(*texts):
    return [row.tobytes() for row in TOKENIZER(list(texts))]


def reader(max_chars=100):
    return TextReader(
        TOKENIZER, ThreadPoolExecutor(1), max_chars=max_chars, metrics=new_metrics().of_texts
    )


def new_pipeline(engine, batcher, metrics, *, max_texts=100):
    places = new_admission(metrics, max_texts=max_texts).texts
    return TextPipeline(engine, batcher, places, metrics=metrics.of_texts)


async def test_tokens_are_those_of_the_tokenizer_and_counted_without_padding():
    tokens = await reader().read(["red", "", "ab", 7])
    assert tokens.ids[0] == ids_of("red")[0]
    assert [error.reason for error in (tokens.ids[1], tokens.ids[3])] == ["empty", "not-a-string"]
    assert tokens.num == 3
    many = [f"text {number}" for number in range(300)]
    assert (await reader().read(many)).ids == ids_of(*many)


async def test_a_text_that_must_stay_whole_is_not_cut():
    cut = await reader().read(["x" * 40, "red"])
    assert cut.num == 33
    whole = await reader().read(["x" * 40, "red"], reject_long=True)
    assert (whole.ids[0].reason, whole.num) == ("too-long", 1)
    assert whole.ids[1] == cut.ids[1]
    (long,) = (await reader(max_chars=10).read(["x" * 11])).ids
    assert (long.reason, "10 characters" in str(long)) == ("too-long", True)


class Noting:
    """A tokenizer that notes the first text of each turn. The first turn waits for `everybody`."""

    context_length = TOKENIZER.context_length

    def __init__(self):
        self.turns = []
        self.everybody = threading.Event()

    def tokenize(self, texts, *, with_cut):
        self.turns.append(texts[0])
        assert self.everybody.wait(10)
        return TOKENIZER.tokenize(texts, with_cut=with_cut)


@pytest.mark.parametrize("owners", [range(5), [None] * 5, ["greedy"] * 5])
async def test_a_word_is_read_after_one_turn_of_long_texts_whoever_came_first(owners):
    noting, metrics = Noting(), new_metrics().of_texts
    shared = TextReader(noting, ThreadPoolExecutor(1), max_chars=100, metrics=metrics)
    long = ["x" * 100] * 500
    tasks = [asyncio.create_task(shared.read(long, owner=owner)) for owner in owners]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(shared.read(["red"], owner="other")))
    await asyncio.sleep(0)
    noting.everybody.set()
    await asyncio.gather(*tasks)
    assert noting.turns.index("red") <= 1


def test_a_turn_is_bounded_in_texts_and_characters():
    turns = list(text_pipeline._turns(["x" * 5000] * 3 + ["y"] * 300 + [7, "z" * 10_000], 9000))
    assert [len(texts) for texts, _ in turns] == [1, 1, 128, 128, 47]
    assert [num for _, num in turns] == [5000, 5000, 5127, 128, 45]
    assert num_chars(["ab", 7, None, "x" * 10], 5) == 2


async def test_texts_go_in_batches_and_come_back_in_order():
    engine, metrics = TextEngine(latency_s=0.001), new_metrics()
    async with new_batcher(engine, metrics.of_texts, max_queued=1000) as batcher:
        pipeline = new_pipeline(engine, batcher, metrics, max_texts=1000)
        ids = ids_of(*(f"{number:03}" for number in range(300)))
        rejected = TextRejected("empty", "the text is empty")
        seen = {}
        encoded = await pipeline.encode(
            [*ids, rejected, np.zeros(32, np.int64).tobytes()],
            deadline=math.inf,
            on_outcome=seen.__setitem__,
        )
        assert encoded.rows == list(range(300))
        reasons = {index: error.reason for index, error in encoded.errors.items()}
        assert reasons == {300: "empty", 301: "no-embedding"}
        expected = np.stack([np.frombuffer(one, np.int64)[:3] for one in ids])
        assert np.array_equal(encoded.embeddings, expected)
        assert len(seen) == 302
        assert max(engine.batches) == 8


async def test_refused_while_down_late_or_full():
    engine, metrics = TextEngine(), new_metrics()
    async with new_batcher(engine, metrics.of_texts) as batcher:
        pipeline = new_pipeline(engine, batcher, metrics, max_texts=4)
        with pytest.raises(Overloaded, match="limit of texts"):
            await pipeline.encode(ids_of("red") * 5, deadline=math.inf)
        with pytest.raises(DeadlineExceeded):
            await pipeline.encode(ids_of("red"), deadline=asyncio.get_running_loop().time() - 1)
        engine.end()
        with pytest.raises(Unavailable):
            await pipeline.encode(ids_of("red"), deadline=math.inf)
