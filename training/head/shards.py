"""The shards of class centers that processes own."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Classes [start, stop) of num_classes, owned by one process.

    The shard is empty if there are more processes than needed.
    """

    start: int
    stop: int
    num_classes: int

    @classmethod
    def of(cls, rank: int, size: int, num_classes: int) -> "Shard":
        """Returns the shard of a rank; shards are contiguous, split like torch.chunk and DTensor.

        All non-empty shards have the same size, except a smaller last one.
        """
        share = -(-num_classes // size)
        return cls(
            min(share * rank, num_classes), min(share * (rank + 1), num_classes), num_classes
        )

    def __len__(self) -> int:
        return self.stop - self.start
