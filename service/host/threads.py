"""The thread budget: the cores that the server may use, divided among its processes."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from threadpoolctl import threadpool_limits

from mlcd.clustering.row_threads import allow_threads
from mlcd.cores import available_cores

if TYPE_CHECKING:  # an engine's process needs none
    from mlcd.service.settings import Settings


@dataclass(frozen=True)
class ThreadBudget:
    """The numbers of threads of one server process.

    Each pool may use all of the process's cores: while one works, others wait. engine: threads of
    the model. decode: images at a time. compute: look-ups, searches and bodies at a time. blas:
    threads of one matrix product in these.
    """

    engine: int
    decode: int
    compute: int
    blas: int

    @classmethod
    def of(cls, settings: "Settings") -> "ThreadBudget":
        """Returns the budget by the process's cpuset and CPU quota, unless the settings differ."""
        share = max(1, available_cores() // settings.processes)
        return cls(settings.engine_threads or share, settings.decode_threads or share, share, share)

    def as_dict(self) -> dict[str, int]:
        return {
            "engine": self.engine,
            "decode": self.decode,
            "compute": self.compute,
            "blas": self.blas,
        }


def limit_blas(num_threads: int) -> None:
    """Limits the threads of numpy's matrix products and of scans, for the life of the process.

    numpy's own choice respects the cpuset, but not a container's CPU quota or other processes.
    """
    threadpool_limits(num_threads, user_api="blas")
    allow_threads(num_threads)


def forbid_tokenizer_threads() -> None:
    """Has the package tokenizers work on the thread that calls it, for the life of the process."""
    # The library reads its own variable when it tokenizes; it has no other switch.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # noqa: TID251
