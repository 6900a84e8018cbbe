"""The processes that work together: the rank of this one, and sums and gathers over all.

torch is imported only where there is more than one process, or a tensor.
"""

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

_TIMEOUT: Final = timedelta(minutes=30)  # the longest time that one process waits for another
# seconds; a failure ends all connections, and a process that notices waits so long for the reason
_LAST_WORD_S: Final = 2.0
_WEAK_SIGNS: Final = ("Connection", "NCCL")  # of a lost process, in an error of no class
_FAILURES: Final = "mlcd/failures"
_Integers = TypeVar("_Integers", np.int64, np.int32)


class Elsewhere(Exception):
    """The error is reported by another process; this one ends silently."""


def torchrun_variable(name: str, default: int) -> int:
    """Returns RANK, LOCAL_RANK, WORLD_SIZE or LOCAL_WORLD_SIZE; the default where there is no
    torchrun.
    """
    # torchrun states a process's rank in no other way
    return int(os.environ.get(name, default))  # noqa: TID251


def is_first() -> bool:
    """Tells whether this is the only process, or the first of a torchrun, which prints for all."""
    return torchrun_variable("RANK", 0) == 0


def is_of_lost_process(error: RuntimeError) -> bool:
    """Tells whether another process is gone, or did not answer in time.

    torch has a class for what its store or NCCL says. gloo's errors name its files, but for that of
    a connection which it closed after an earlier wait.
    """
    import torch.distributed as dist

    of_gloo = any(name in str(error) for name in ("gloo", "pair closure"))
    return of_gloo or isinstance(error, dist.DistError)


@dataclass(frozen=True)
class World:
    """A process group, or just this process (`group` None and `size` 1).

    Every process calls each of its methods at the same point. device: "cuda" or "cpu", through
    which arrays are summed.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    device: str = "cpu"

    @classmethod
    def current(cls, device: str = "cpu") -> "World":
        """Returns the default process group where one is initialized, else this process alone."""
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
        """Returns the sum over processes, the same in all; `values` itself is not changed."""
        if self.size == 1:
            return values
        import torch

        total = self.sum(torch.from_numpy(np.ascontiguousarray(values)).to(self.device))
        summed: NDArray[_Integers] = total.cpu().numpy()
        return summed

    def share(self, value: Any) -> Any:
        """Returns the first process's value in all processes."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def own_rows(self, num_rows: int) -> tuple[int, int]:
        """Returns the range of rows that this process reads: each has an equal share, in order of
        rank.
        """
        return self.rank * num_rows // self.size, (self.rank + 1) * num_rows // self.size

    def row_counts(self, num_rows: int, device: "torch.device") -> list[int]:
        """Returns how many rows each process holds, in order of rank."""
        if self.size == 1:
            return [num_rows]
        import torch

        counts = torch.zeros(self.size, dtype=torch.int64, device=device)
        counts[self.rank] = num_rows
        return [int(count) for count in self.sum(counts)]

    def gather_rows(self, rows: "Tensor", counts: Sequence[int] | None = None) -> "Tensor":
        """Returns the rows of all processes in order of rank; their numbers may differ.

        Gradients flow back to the owner. counts: the numbers, where the host knows them already.
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
    """Opens the processes of this torchrun, or this process alone where there is none. A process
    group that is open already, as on Ray, is taken and left open.

    cuda: true where tensors on a GPU are reduced, too; None where this machine has one. timeout:
    the longest that one process waits for another. Raises ConfigInvalid where torch is missing.
    """
    if torchrun_variable("WORLD_SIZE", 1) == 1:
        yield World()
        return
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise ConfigInvalid(
            "several processes need torch", remedy=install_command("train")
        ) from error
    if cuda is None:
        cuda = torch.cuda.is_available()
    if dist.is_initialized():  # by what started the processes, and it ends the group, too
        yield World.current("cuda" if cuda else "cpu")
        return
    if cuda:
        torch.cuda.set_device(torchrun_variable("LOCAL_RANK", 0))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
    try:
        yield World.current("cuda" if cuda else "cpu")
    finally:
        dist.destroy_process_group()


@contextmanager
def one_voice(world: World) -> Iterator[None]:
    """Makes the first process that fails raise its error, and all others Elsewhere.

    No process waits for the others first, because they may be anywhere in their work.
    """
    if world.size == 1:
        yield
        return
    import torch.distributed as dist

    # torchrun's store outlives a process that fails; torch has no public way to it.
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
    try:
        yield
    except MlcdError as error:
        if store.add(_FAILURES, 1) == 1:
            raise
        # torchrun stops all processes once one has ended, so the process with the reason goes first
        time.sleep(_LAST_WORD_S)
        raise Elsewhere from error
    except RuntimeError as error:
        # Hardly anything but a lost process raises a RuntimeError here, so a weak sign is enough.
        if not is_of_lost_process(error) and not any(sign in str(error) for sign in _WEAK_SIGNS):
            raise
        time.sleep(_LAST_WORD_S)
        if store.add(_FAILURES, 1) == 1:
            raise Unavailable(
                "a process is gone", remedy="the same command goes on from its checkpoint"
            ) from error
        time.sleep(_LAST_WORD_S)
        raise Elsewhere from error
