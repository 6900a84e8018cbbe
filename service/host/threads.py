"""The thread budget: the cores that the server may use, divided among its processes."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from threadpoolctl import threadpool_limits

from mlcd.clustering.row_threads import allow_threads
from mlcd.cores import available_cores

if TYPE_CHECKING:  # an engine's process does not load settings
    from mlcd.service.settings import Settings


@dataclass(frozen=True)
class ThreadBudget:
    """The numbers of threads of one server process.

    Each pool may use all of the process's cores, because usually only one pool is busy. engine:
    threads of the model. decode: images decoded at a time. compute: look-ups, searches and bodies
    processed at a time. blas: threads of one matrix product in look-ups and searches.
    """

    engine: int
    decode: int
    compute: int
    blas: int

    @classmethod
    def of(cls, settings: "Settings") -> "ThreadBudget":
        """Returns the budget from the settings or, by default, from cpuset and CPU quota."""
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
    """Limits the threads of numpy's matrix products and of scans for the life of the process.

    numpy's default respects the cpuset, but not a container's CPU quota or other processes.
    """
    threadpool_limits(num_threads, user_api="blas")
    allow_threads(num_threads)


def forbid_tokenizer_threads() -> None:
    """Makes the package tokenizers use only the calling thread, for the life of the process."""
    # The library has no other switch than this variable, which it reads when it tokenizes.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # noqa: TID251
