"""The pipeline from texts to embeddings: checks, tokenizing on a thread, admission, dispatch.

A bad text does not fail other texts. The `tokenizers` library releases the interpreter's lock while
it works.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from mlcd.errors import DeadlineExceeded, Rejection, TextRejected
from mlcd.models.tokenizer import Tokenizer
from mlcd.service.inference.admission import Places
from mlcd.service.inference.contract import Dispatcher, Engine, refuse_when_down
from mlcd.service.inference.decoding_threads import DecodingThreads
from mlcd.service.inference.outcomes import (
    Account,
    Anybody,
    Encoded,
    EncodedItem,
    OnOutcome,
    Timings,
    join_outcomes,
    report_task,
)
from mlcd.service.telemetry.request import took
from mlcd.service.telemetry.text_metrics import TextMetrics
from mlcd.text_checks import check_text, too_long

# Limits of one turn, after which other requests get their turn: texts that are tokenized or queued,
# and characters that are tokenized (unless one text is longer), in about 20 ms.
_TURN_TEXTS: Final = 128
_TURN_CHARS: Final = 8192
_TURN_COST: Final = 64  # fixed cost of a turn, in characters


@dataclass(frozen=True)
class Tokens:
    """The tokenized texts of a request.

    ids: for each text, its token ids int64 [T] as bytes, or its rejection. num: number of tokens of
    all texts, without padding and after truncation.
    """

    ids: list[bytes | TextRejected]
    num: int
    seconds: float


class TextReader:
    """Tokenizes texts on a thread that clients share fairly, by characters."""

    def __init__(
        self, tokenizer: Tokenizer, thread: Executor, *, max_chars: int, metrics: TextMetrics
    ) -> None:
        self._tokenizer = tokenizer
        self._thread = DecodingThreads(thread, item_cost=_TURN_COST)
        self._max_chars, self._metrics = max_chars, metrics
        self.context_length = tokenizer.context_length

    async def read(
        self, texts: Sequence[object], *, reject_long: bool = False, owner: object | None = None
    ) -> Tokens:
        """Checks and tokenizes texts.

        reject_long: whether to reject a text that exceeds the context length, instead of truncating
        it. owner: the client; None means that the request is its own owner.
        """
        started = time.perf_counter()
        owner = object() if owner is None else owner
        ids: list[bytes | TextRejected] = []
        num = 0
        for batch, num_chars in _turns(texts, self._max_chars):
            tokenize = partial(
                _tokenize, self._tokenizer, batch, self._max_chars, reject_long=reject_long
            )
            batch_ids, batch_num = await self._thread.run(owner, num_chars, tokenize)
            ids += batch_ids
            num += batch_num
        ended = time.perf_counter()
        took("tokenize", started, ended)
        self._metrics.observe_tokenization(ended - started)
        return Tokens(ids, num, ended - started)


def num_chars(texts: Iterable[object], max_chars: int) -> int:
    """Returns the number of characters to tokenize; longer texts count 0, as they are rejected."""
    return sum(_num_chars(text, max_chars) for text in texts)


def _num_chars(text: object, max_chars: int) -> int:
    return len(text) if isinstance(text, str) and len(text) <= max_chars else 0


def _turns(texts: Sequence[object], max_chars: int) -> Iterator[tuple[list[object], int]]:
    """Yields the texts of each turn on the thread, and their number of characters."""
    batch: list[object] = []
    num = 0
    for text in texts:
        text_chars = _num_chars(text, max_chars)
        if batch and (len(batch) == _TURN_TEXTS or num + text_chars > _TURN_CHARS):
            yield batch, num
            batch, num = [], 0
        batch.append(text)
        num += text_chars
    if batch:
        yield batch, num


def _tokenize(
    tokenizer: Tokenizer, texts: Sequence[object], max_chars: int, *, reject_long: bool
) -> tuple[list[bytes | TextRejected], int]:
    """Returns the token ids or the rejection of each text, and the number of tokens."""
    outcomes: list[bytes | TextRejected] = []
    accepted: list[str] = []
    for text in texts:
        checked = check_text(text, max_chars=max_chars)
        if isinstance(checked, str):
            accepted.append(checked)
            outcomes.append(b"")
        else:
            outcomes.append(checked)
    if not accepted:
        return outcomes, 0
    tokenized = tokenizer.tokenize(accepted, with_cut=reject_long)
    indices = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, bytes)]
    for index, ids, cut in zip(indices, tokenized.ids, tokenized.cut, strict=True):
        outcomes[index] = too_long(tokenizer.context_length, "tokens") if cut else ids.tobytes()
    return outcomes, int(tokenized.num[~tokenized.cut].sum())


class TextPipeline:
    """Encodes token ids to embeddings, for all routes."""

    def __init__(
        self,
        engine: Engine,
        dispatcher: Dispatcher,
        places: Places,
        *,
        metrics: TextMetrics,
    ) -> None:
        self._engine, self._dispatcher, self._places = engine, dispatcher, places
        self._dimension, self._metrics = engine.served.dimension, metrics

    async def encode(
        self,
        texts: Sequence[bytes | Rejection],
        /,
        *,
        deadline: float,
        on_outcome: OnOutcome | None = None,
        account: Account | None = None,
    ) -> Encoded:
        """Encodes every text independently; a text is the bytes of its token ids, int64 [T].

        deadline: by the running loop's clock. A cancelled call drops texts that are not yet
        encoded. Raises Overloaded when the server is at a limit, Unavailable while the engine is
        down or when it fails, DeadlineExceeded, and the errors of `account`.
        """
        account = account or Anybody()
        if asyncio.get_running_loop().time() > deadline:
            raise DeadlineExceeded(
                "the time for a request has passed", remedy="send fewer texts at once"
            )
        refuse_when_down(self._engine, self._metrics)
        with self._places.hold(len(texts), deadline=deadline):
            await account.charge([1] * len(texts))
            outcomes = await self._encode_all(texts, deadline, on_outcome)
        for outcome in outcomes:
            if isinstance(outcome, Rejection):
                self._metrics.count_rejected(outcome.reason)
        return join_outcomes(outcomes, dimension=self._dimension)

    async def _encode_all(
        self, texts: Sequence[bytes | Rejection], deadline: float, on_outcome: OnOutcome | None
    ) -> list[EncodedItem | Rejection]:
        request = object()
        tasks: list[asyncio.Task[EncodedItem | Rejection]] = []
        try:
            for start in range(0, len(texts), _TURN_TEXTS):
                for index, ids in enumerate(texts[start : start + _TURN_TEXTS], start):
                    task = asyncio.create_task(self._encode_one(ids, deadline, request))
                    if on_outcome is not None:
                        task.add_done_callback(partial(report_task, on_outcome, index))
                    tasks.append(task)
                await asyncio.sleep(0)
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _encode_one(
        self, ids: bytes | Rejection, deadline: float, request: object
    ) -> EncodedItem | Rejection:
        if isinstance(ids, Rejection):
            return ids
        row = await self._dispatcher.encode(
            np.frombuffer(ids, np.int64), deadline=deadline, request=request
        )
        row.record_stages()
        if not row.embedding.any():
            return TextRejected("no-embedding", "the model finds nothing in this text to describe")
        return EncodedItem(row.embedding, Timings(0.0, row.queue_s, row.inference_s))
