"""The group of cooperating processes: the rank of this process, and sums and gathers over all.

torch is imported only with several processes, or for a tensor.
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ConfigInvalid, MlcdError, Unavailable
from mlcd.extras import install_command

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_log = logging.getLogger(__name__)

_TIMEOUT: Final = timedelta(minutes=30)  # the longest time that one process waits for another
# Seconds. A failure closes all connections; a process that notices waits this long, so that the
# failed process can report the reason first.
_REASON_WAIT_S: Final = 2.0
_LOST_PROCESS_WORDS: Final = ("Connection", "NCCL")  # in messages of plain RuntimeErrors
_FAILURE_COUNT_KEY: Final = "mlcd/failures"
_Integers = TypeVar("_Integers", np.int64, np.int32)


class ReportedElsewhere(Exception):
    """Another process reports the error; this process ends silently."""


def torchrun_variable(name: str, default: int) -> int:
    """Returns RANK, LOCAL_RANK, WORLD_SIZE or LOCAL_WORLD_SIZE; the default if torchrun did
    not start this process.
    """
    # torchrun passes the rank only through the environment
    return int(os.environ.get(name, default))  # noqa: TID251


def is_first() -> bool:
    """Tells whether this process has rank 0; only this process prints."""
    return torchrun_variable("RANK", 0) == 0


def own_gpu() -> int:
    """Returns the index of this process's GPU; processes beyond the number of GPUs share them."""
    import torch

    return torchrun_variable("LOCAL_RANK", 0) % torch.cuda.device_count()


def is_of_lost_process(error: RuntimeError) -> bool:
    """Tells whether the error means that another process is gone or did not answer in time.

    torch has a class for errors of its store and NCCL. gloo's errors contain paths of its source
    files, except the error "pair closure" for a connection that it closed after an earlier wait.
    """
    import torch.distributed as dist

    is_gloo_error = any(name in str(error) for name in ("gloo", "pair closure"))
    return is_gloo_error or isinstance(error, dist.DistError)


@dataclass(frozen=True)
class World:
    """A process group, or just this process (`group` None and `size` 1).

    All processes must call each method at the same point. device: "cuda" or "cpu"; arrays are
    summed there.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    device: str = "cpu"

    @classmethod
    def current(cls, device: str = "cpu") -> "World":
        """Returns the default process group if it is initialized, otherwise only this process."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, device)

    def sum(self, tensor: "Tensor") -> "Tensor":
        """Returns the sum over processes, without gradient; `tensor` itself is not changed."""
        return self._reduce(tensor, "SUM")

    def max(self, tensor: "Tensor") -> "Tensor":
        """Returns the maximum over processes, without gradient; `tensor` itself is not changed."""
        return self._reduce(tensor, "MAX")

    def sum_integers(self, values: NDArray[_Integers]) -> NDArray[_Integers]:
        """Returns the sum over processes, in all processes; `values` itself is not changed."""
        if self.size == 1:
            return values
        import torch

        total = self.sum(torch.from_numpy(np.ascontiguousarray(values)).to(self.device))
        summed: NDArray[_Integers] = total.cpu().numpy()
        return summed

    def broadcast(self, value: Any) -> Any:
        """Returns the first process's value in all processes."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def own_rows(self, num_rows: int) -> tuple[int, int]:
        """Returns the range of rows that this process reads: rows are split evenly, in order of
        rank.
        """
        return self.rank * num_rows // self.size, (self.rank + 1) * num_rows // self.size

    def row_counts(self, num_rows: int, device: "torch.device") -> list[int]:
        """Returns the number of rows of each process, in order of rank."""
        if self.size == 1:
            return [num_rows]
        import torch

        counts = torch.zeros(self.size, dtype=torch.int64, device=device)
        counts[self.rank] = num_rows
        return [int(count) for count in self.sum(counts)]

    def gather_rows(self, rows: "Tensor", counts: Sequence[int] | None = None) -> "Tensor":
        """Returns the rows of all processes in order of rank; row counts may differ.

        Gradients flow back to the owner. counts: rows per process, if already known on the host.
        """
        if self.size == 1:
            return rows
        from mlcd.gather import gather_rows

        counts = counts or self.row_counts(rows.shape[0], rows.device)
        return gather_rows(rows, counts, self.rank, self.group)

    def _reduce(self, tensor: "Tensor", operation: str) -> "Tensor":
        if self.size == 1:
            return tensor
        import torch.distributed as dist

        reduced = tensor.detach().clone()
        dist.all_reduce(reduced, getattr(dist.ReduceOp, operation), group=self.group)
        return reduced


@contextmanager
def open_world(*, cuda: bool | None = None, timeout: timedelta = _TIMEOUT) -> Iterator[World]:
    """Joins the process group of torchrun; without torchrun, yields only this process. A process
    group that is already open, as on Ray, is used and left open.

    cuda: whether GPU tensors are reduced too; None: if this machine has a GPU. timeout: longest
    wait of one process for another. Raises ConfigInvalid if torch is missing.
    """
    if torchrun_variable("WORLD_SIZE", 1) == 1:
        yield World()
        return
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise ConfigInvalid(
            "several processes require torch", remedy=install_command("train")
        ) from error
    if cuda is None:
        cuda = torch.cuda.is_available()
    if dist.is_initialized():  # whatever opened the group also closes it
        yield World.current("cuda" if cuda else "cpu")
        return
    if cuda:
        torch.cuda.set_device(own_gpu())
    dist.init_process_group(_choose_backend(cuda=cuda), timeout=timeout)
    try:
        yield World.current("cuda" if cuda else "cpu")
    finally:
        dist.destroy_process_group()


def _choose_backend(*, cuda: bool) -> str:
    """Returns torch's name of the backend, the same in all processes of a machine."""
    if not cuda:
        return "gloo"
    import torch

    num_processes, num_gpus = torchrun_variable("LOCAL_WORLD_SIZE", 1), torch.cuda.device_count()
    if num_processes <= num_gpus:
        return "cpu:gloo,cuda:nccl"
    if torchrun_variable("LOCAL_RANK", 0) == 0:
        _log.warning(
            "%d processes share %d GPU%s, which NCCL refuses: sums over processes go through the "
            "CPU (gloo), which is slow. Start one process for each GPU",
            num_processes,
            num_gpus,
            "s" if num_gpus > 1 else "",
        )
    return "cpu:gloo,cuda:gloo"


@contextmanager
def one_voice(world: World) -> Iterator[None]:
    """Makes the first process that fails raise its error, all other processes ReportedElsewhere.

    Processes do not meet, because they may be at different points of their work.
    """
    if world.size == 1:
        yield
        return
    import torch.distributed as dist

    # torchrun's store outlives a failed process; torch lacks a public accessor.
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
    try:
        yield
    except MlcdError as error:
        if store.add(_FAILURE_COUNT_KEY, 1) == 1:
            raise
        # torchrun stops all processes once one ends, so the process with the reason must end first
        time.sleep(_REASON_WAIT_S)
        raise ReportedElsewhere from error
    except RuntimeError as error:
        # Almost only a lost process raises a RuntimeError here, so a word in the message suffices.
        if not is_of_lost_process(error) and not any(
            word in str(error) for word in _LOST_PROCESS_WORDS
        ):
            raise
        time.sleep(_REASON_WAIT_S)
        if store.add(_FAILURE_COUNT_KEY, 1) == 1:
            raise Unavailable(
                "another process was lost",
                remedy="run the same command again: it resumes from its checkpoint",
            ) from error
        time.sleep(_REASON_WAIT_S)
        raise ReportedElsewhere from error
