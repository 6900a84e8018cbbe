"""Decoders that work ahead of the trainer, in threads or processes; chunks come back in order."""

import atexit
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import resource_tracker
from typing import Any, Final, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from mlcd.errors import Unavailable
from mlcd.images.transform import DecodeMode
from mlcd.training.data.augment import Augmentation
from mlcd.training.data.crops import CropReader, Crops, PictureCrops
from mlcd.training.data.pictures import Sample

Chunk = Sequence[Sample]

_CHUNKS_AHEAD: Final = 2  # for each thread or process
_SIGNS_OF_DEATH: Final = ("exited unexpectedly", "shared memory", "No space left")
# torch's prefix of an error that it passes on from a live worker
_FROM_A_LIVING_WORKER: Final = "Caught "
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Decoders(Protocol):
    """Decodes chunks of samples, several at a time."""

    def decode(self, chunks: Iterable[Chunk]) -> Iterator[Crops]:
        """Yields every chunk decoded, in order; to be called once.

        Only a bounded number of chunks is taken ahead.
        """

    def close(self) -> None: ...


def block_stop_signals() -> None:
    """Leaves the stop signals to the other threads; processes started from this thread never get
    them.

    Ctrl-C in a terminal and a scheduler's signal before preemption reach all processes of a run at
    once. Only the trainer may act on them, because it needs its workers until its last checkpoint
    is written.
    """
    # The tracker unblocks the signals when it starts, so it must be started before.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)


class ThreadDecoders:
    """Decodes in threads; Pillow releases the interpreter lock while it works."""

    def __init__(self, reader: CropReader, num_threads: int) -> None:
        self._reader, self._ahead = reader, _CHUNKS_AHEAD * num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="decode")

    def decode(self, chunks: Iterable[Chunk]) -> Iterator[Crops]:
        waiting: deque[Future[Crops]] = deque()
        for chunk in chunks:
            waiting.append(self._pool.submit(self._reader.read, chunk))
            if len(waiting) > self._ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class ProcessDecoders:
    """Decodes in worker processes, started anew (never forked, because the trainer has threads)."""

    def __init__(
        self,
        locations: Sequence[str],
        mode: DecodeMode,
        augmentation: Augmentation,
        num_workers: int,
    ) -> None:
        self._chunks = _WorkerChunks(locations, mode, augmentation)
        self._num_workers = num_workers
        self._iterator: Any = None

    def decode(self, chunks: Iterable[Chunk]) -> Iterator[Crops]:
        """Yields the crops. Raises Unavailable within seconds if a worker process ends
        unexpectedly.
        """
        # The generator gives the workers their seed, instead of the trainer's random numbers.
        loader: DataLoader[Crops] = DataLoader(
            self._chunks,
            batch_sampler=chunks,  # type: ignore[arg-type]  # any batches of what the dataset takes
            num_workers=self._num_workers,
            prefetch_factor=_CHUNKS_AHEAD,
            collate_fn=_as_it_is,
            worker_init_fn=_end_if_alone,
            multiprocessing_context=multiprocessing.get_context("spawn"),
            generator=torch.Generator(),
        )
        self._iterator = iter(loader)
        # At the exit of a trainer that does not close, multiprocessing would wait for workers that
        # it cannot terminate.
        atexit.register(self.close)
        try:
            yield from self._iterator
        except (RuntimeError, EOFError, OSError) as error:
            if not _tells_of_death(error):
                raise
            raise Unavailable(
                "a worker process that decodes images was killed",
                remedy="often memory ran out, or a container's /dev/shm: enlarge it or lower "
                "data.workers",
            ) from error

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._iterator is None:
            return
        # Otherwise they end only when the garbage is collected.
        self._iterator._shutdown_workers()  # noqa: SLF001
        for worker in self._iterator._workers:  # noqa: SLF001
            # The worker may be stuck in a read, where SIGTERM does not reach it.
            if worker.is_alive():
                worker.kill()
        self._iterator = None


class _WorkerChunks(Dataset[Crops]):
    """The state of a worker process, which opens the sources at its first chunk."""

    def __init__(
        self, locations: Sequence[str], mode: DecodeMode, augmentation: Augmentation
    ) -> None:
        self._locations, self._mode, self._augmentation = locations, mode, augmentation
        self._reader: PictureCrops | None = None

    def __getitems__(self, samples: list[Sample]) -> Crops:
        if self._reader is None:
            self._reader = PictureCrops.open(self._locations, self._mode, self._augmentation)
        crops = self._reader.read(samples)
        # Here an error of a full /dev/shm reaches the trainer; in the queue's own thread it would
        # be lost.
        for pixels in crops.views:
            pixels.share_memory_()
        return crops


def _tells_of_death(error: Exception) -> bool:
    if any(sign in str(error) for sign in _SIGNS_OF_DEATH):
        return True
    # If a worker dies while its crops are handed over, the connection ends or is missing.
    return isinstance(error, EOFError | OSError) and not str(error).startswith(
        _FROM_A_LIVING_WORKER
    )


def _end_if_alone(worker: int) -> None:
    """Ends a worker whose trainer was killed while it started; from then on torch watches it."""
    del worker
    trainer = multiprocessing.parent_process()
    if trainer is not None and not trainer.is_alive():
        os._exit(1)


def _as_it_is(chunk: Any) -> Any:
    return chunk
