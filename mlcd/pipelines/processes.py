"""The processes that torchrun started, for pipelines that can share their work."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.group import Alone, Group
from mlcd.errors import ConfigInvalid, MlcdError, Unavailable

if TYPE_CHECKING:
    from mlcd.world import World

_TIMEOUT: Final = timedelta(minutes=30)  # the longest that one process may wait for another
_LAST_WORD_S: Final = 2.0  # a failure ends all connections: whoever notices that waits so long for the reason
_FAILURES: Final = "mlcd/failures"
_Integers = TypeVar("_Integers", np.int64, np.int32)


class Elsewhere(Exception):
    """Another process tells what went wrong; this one ends without a word."""


@contextmanager
def open_group() -> Iterator[Group]:
    """The processes of this torchrun; this one alone where there is none. Raises ConfigInvalid without torch.

    Where the work fails in several processes the first one raises its error, and the others Elsewhere.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:  # noqa: TID251 - torchrun tells a process its place in no other way
        yield Alone()
        return
    try:
        import torch
        import torch.distributed as dist

        from mlcd.world import World
    except ImportError as error:
        raise ConfigInvalid("several processes need torch", remedy="pip install 'mlcd[train]'") from error
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # noqa: TID251 - as above
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=_TIMEOUT)
    try:
        with _one_voice(dist.distributed_c10d._get_default_store()):  # noqa: SLF001 - torch has no public way to it
            yield TorchGroup(World.current(), "cuda" if on_gpu else "cpu")
    finally:
        dist.destroy_process_group()


@contextmanager
def _one_voice(store: Any) -> Iterator[None]:
    """store: the one that torchrun keeps, which outlives a process that fails."""
    try:
        yield
    except MlcdError as error:
        if store.add(_FAILURES, 1) == 1:
            raise
        time.sleep(_LAST_WORD_S)  # torchrun stops all processes once one has ended: the one that tells why goes first
        raise Elsewhere from error
    except RuntimeError as error:
        if "Connection" not in str(error) and "gloo" not in str(error) and "NCCL" not in str(error):
            raise
        time.sleep(_LAST_WORD_S)
        if store.add(_FAILURES, 1) == 1:
            raise Unavailable("a process is gone", remedy="the same command goes on from its checkpoint") from error
        time.sleep(_LAST_WORD_S)
        raise Elsewhere from error


class TorchGroup:
    """See `mlcd.clustering.group.Group`: arrays of whole numbers by way of a process group of torch."""

    def __init__(self, world: "World", device: str = "cpu") -> None:
        self.rank, self.size = world.rank, world.size
        self._world, self._device = world, device

    def sum(self, values: NDArray[_Integers]) -> NDArray[_Integers]:
        import torch

        total = self._world.sum(torch.from_numpy(np.ascontiguousarray(values)).to(self._device))
        summed: NDArray[_Integers] = total.cpu().numpy()
        return summed

    def share(self, value: Any) -> Any:
        import torch.distributed as dist

        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._world.group)
        return values[0]
