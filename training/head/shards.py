"""Rows of class centers spread over processes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Classes [start, stop) of num_classes, owned by one process.

    There are none if there are more processes than needed.
    """

    start: int
    stop: int
    num_classes: int

    @classmethod
    def of(cls, rank: int, size: int, num_classes: int) -> "Shard":
        """Returns the shard of a rank; shards are contiguous, cut as torch.chunk and so DTensor do.

        All processes that own classes own the same number, but for the last one.
        """
        share = -(-num_classes // size)
        return cls(
            min(share * rank, num_classes), min(share * (rank + 1), num_classes), num_classes
        )

    def __len__(self) -> int:
        return self.stop - self.start
