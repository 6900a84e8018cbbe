"""Rows of class centers spread over processes: who owns which."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Classes [start, stop) of num_classes, owned by one process; none where there are more processes than needed."""

    start: int
    stop: int
    num_classes: int

    @classmethod
    def of(cls, rank: int, size: int, num_classes: int) -> "Shard":
        """Contiguous, cut as torch.chunk and so DTensor cut: all but the last process that owns any own as many."""
        each = -(-num_classes // size)
        return cls(min(each * rank, num_classes), min(each * (rank + 1), num_classes), num_classes)

    def __len__(self) -> int:
        return self.stop - self.start
