"""The processes that cluster together: what k-means asks of them."""

import hashlib
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import Unavailable
from mlcd.types import Embeddings

_Integers = TypeVar("_Integers", np.int64, np.int32)


class Group(Protocol):
    """One process among `size`; every method is called by all of them at the same place."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, values: NDArray[_Integers]) -> NDArray[_Integers]:
        """The sum over processes, the same in all; `values` itself is not changed."""
        ...

    def share(self, value: Any) -> Any:
        """The value that the first process has, in all."""
        ...


class Alone:
    """One process."""

    rank, size = 0, 1

    def sum(self, values: NDArray[_Integers]) -> NDArray[_Integers]:
        return values

    def share(self, value: Any) -> Any:
        return value


def own_rows(num_rows: int, group: Group) -> tuple[int, int]:
    """The range of rows that this process of the group reads."""
    return group.rank * num_rows // group.size, (group.rank + 1) * num_rows // group.size


def check_equal(group: Group, centers: Embeddings, iteration: int) -> None:
    """Raise Unavailable unless all processes hold the same centers, byte for byte."""
    digests = np.zeros((group.size, 4), dtype=np.int64)
    digests[group.rank] = np.frombuffer(hashlib.sha256(np.ascontiguousarray(centers).data).digest(), dtype=np.int64)
    digests = group.sum(digests)
    if other := [rank for rank in range(group.size) if (digests[rank] != digests[0]).any()]:
        raise Unavailable(
            f"after iteration {iteration} the centers of process {other[0]} differ from those of process 0",
            remedy="run the same versions of mlcd and numpy on the same kind of CPU in all processes",
        )
