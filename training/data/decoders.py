"""Decodes chunks of samples ahead of the trainer, in threads or processes, in order."""

import atexit
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext
from typing import Any, Final, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from mlcd.errors import Unavailable
from mlcd.images.transform import DecodeMode
from mlcd.training.data.augment import Augmentation
from mlcd.training.data.crops import CropReader, Crops, PictureCrops
from mlcd.training.data.pictures import Sample

Chunk = Sequence[Sample]

_CHUNKS_AHEAD: Final = 2  # per thread or process
_WORKER_LOST_SIGNS: Final = ("exited unexpectedly", "shared memory", "No space left")
# torch's prefix of an error that a live worker raised
_RAISED_BY_WORKER: Final = "Caught "
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Decoders(Protocol):
    """Decodes chunks of samples, several at a time."""

    def decode(self, chunks: Iterable[Chunk]) -> Iterator[Crops]:
        """Yields the decoded chunks in order, reading a bounded number of chunks ahead.

        May be called only once.
        """

    def close(self) -> None: ...


def block_stop_signals() -> None:
    """Blocks the stop signals in this thread, and in processes that it starts.

    Ctrl-C in a terminal and a scheduler's signal before preemption reach all processes of a run at
    once. Only the trainer may act on them, because it needs its workers until its last checkpoint
    is written.
    """
    # The resource tracker unblocks the signals when it starts, so it must start first.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)


class ThreadDecoders:
    """Decodes in threads, because Pillow releases the GIL while it decodes."""

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


class WorkerContext(SpawnContext):
    """Spawns the workers, spawned because forking a trainer with threads is unsafe. Its events have
    no lock: a worker that is killed while it holds the lock would stop the trainer and the other
    workers forever.
    """

    def Event(self) -> Any:
        return _SharedFlag(self.RawValue("b", 0))


class _SharedFlag:
    """The part of `multiprocessing.Event` that torch's loader uses, in one shared byte."""

    def __init__(self, byte: Any) -> None:
        self._byte = byte

    def set(self) -> None:
        self._byte.value = 1

    def is_set(self) -> bool:
        return bool(self._byte.value)


class ProcessDecoders:
    """Decodes in worker processes."""

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
        """Yields the crops. Raises Unavailable within seconds if a worker is killed."""
        # Without its own generator, the loader would seed its workers from the trainer's.
        loader: DataLoader[Crops] = DataLoader(
            self._chunks,
            batch_sampler=chunks,  # type: ignore[arg-type]  # batches of Sample, not of int
            num_workers=self._num_workers,
            prefetch_factor=_CHUNKS_AHEAD,
            collate_fn=_collate,
            worker_init_fn=_exit_if_orphaned,
            multiprocessing_context=WorkerContext(),
            generator=torch.Generator(),
        )
        self._iterator = iter(loader)
        # If the trainer exits without close(), multiprocessing would wait for workers whose SIGTERM
        # is blocked.
        atexit.register(self.close)
        try:
            yield from self._iterator
        except (RuntimeError, EOFError, OSError) as error:
            if not _is_worker_lost(error):
                raise
            raise Unavailable(
                "a worker process that decodes images was killed",
                remedy="often memory or a container's /dev/shm is full: enlarge it, or lower "
                "data.workers",
            ) from error

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._iterator is None:
            return
        # Otherwise the workers exit only when the iterator is garbage-collected.
        self._iterator._shutdown_workers()  # noqa: SLF001
        for worker in self._iterator._workers:  # noqa: SLF001
            # SIGTERM does not end a worker that is stuck in a read.
            if worker.is_alive():
                worker.kill()
        self._iterator = None


class _WorkerChunks(Dataset[Crops]):
    """The data set of a worker process, which opens the sources at its first chunk."""

    def __init__(
        self, locations: Sequence[str], mode: DecodeMode, augmentation: Augmentation
    ) -> None:
        self._locations, self._mode, self._augmentation = locations, mode, augmentation
        self._reader: PictureCrops | None = None

    def __getitems__(self, samples: list[Sample]) -> Crops:
        if self._reader is None:
            self._reader = PictureCrops.open(self._locations, self._mode, self._augmentation)
        crops = self._reader.read(samples)
        # Moved here so that an error (/dev/shm is full) reaches the trainer; in the queue's thread
        # it would be lost.
        for pixels in crops.views:
            pixels.share_memory_()
        return crops


def _is_worker_lost(error: Exception) -> bool:
    if any(sign in str(error) for sign in _WORKER_LOST_SIGNS):
        return True
    # If a worker dies during the transfer of its crops, the connection breaks.
    return isinstance(error, EOFError | OSError) and not str(error).startswith(_RAISED_BY_WORKER)


def _exit_if_orphaned(worker: int) -> None:
    """Exits if the trainer was killed while this worker started; later torch checks that."""
    del worker
    trainer = multiprocessing.parent_process()
    if trainer is not None and not trainer.is_alive():
        os._exit(1)


def _collate(chunk: Any) -> Any:
    return chunk
