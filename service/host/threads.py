"""How many threads compute at one time: the cores that the server may use, divided among its processes."""

from dataclasses import dataclass

from threadpoolctl import threadpool_limits

from mlcd.cores import available_cores
from service.settings import Settings


@dataclass(frozen=True)
class ThreadBudget:
    """Of one server process. Each of its pools may have all of the process's cores: while one works others wait.

    engine: of the model; decode: images at a time; compute: look-ups, searches and bodies at a time; blas: of one
    matrix product of theirs.
    """

    engine: int
    decode: int
    compute: int
    blas: int

    @classmethod
    def of(cls, settings: Settings) -> "ThreadBudget":
        """By the cpuset and the CPU quota of the process, unless the settings say otherwise."""
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
    """For good. numpy's own choice knows the cpuset and not a container's CPU time, nor of other processes."""
    threadpool_limits(num_threads, user_api="blas")
