"""The processes that torchrun started, for pipelines that can share their work."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.group import Alone, Group
from mlcd.errors import ConfigInvalid

if TYPE_CHECKING:
    from mlcd.world import World

_TIMEOUT: Final = timedelta(minutes=30)  # the longest that one process may wait for another
_Integers = TypeVar("_Integers", np.int64, np.int32)


@contextmanager
def open_group() -> Iterator[Group]:
    """The processes of this torchrun; this one alone where there is none. Raises ConfigInvalid without torch."""
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
        yield TorchGroup(World.current(), "cuda" if on_gpu else "cpu")
    finally:
        dist.destroy_process_group()


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
