"""What can end a piece early, and what of it the job tells: safe to show."""

from typing import Final

from mlcd.errors import ArtifactInvalid, ConfigInvalid, DiskFull, InvalidInput, MlcdError, NotFound
from mlcd.pipelines.shard import InputChanged
from service.jobs.job import Problem, Stage
from service.problems import name_of, status_of

_AGAIN: Final = "retry the job when that is mended"


class Stopped(Exception):
    """The piece is to be left as it is."""


class EngineDown(Exception):
    """The engine fails on a blank image, too: the piece is not at fault."""


class OtherCenters(ConfigInvalid):
    """The job was submitted for other centers than a worker has."""


def problem_of(error: BaseException) -> Problem:
    """Paths of the job's own input and output are known to who asked for it; the rest is for the log."""
    if isinstance(error, DiskFull):
        return Problem("disk-full", error.message, "free space, then retry the job")
    if isinstance(error, InputChanged):
        return Problem("input-changed", error.message, error.remedy)
    if isinstance(error, OtherCenters):
        return Problem("other-centers", error.message, "submit the job again, or give every worker those centers")
    if isinstance(error, ConfigInvalid | ArtifactInvalid):
        return Problem("worker-misconfigured", "a worker cannot do this job; its log says why", _AGAIN)
    if isinstance(error, MlcdError):
        return Problem(name_of(status_of(error)), error.message, error.remedy or _AGAIN)
    return Problem("internal-error", "a worker failed on this piece; its log says where", _AGAIN)


def is_fatal(error: BaseException, stage: Stage) -> bool:
    """Whether all other pieces of the job would fail alike."""
    if isinstance(error, DiskFull | InputChanged | ConfigInvalid):
        return True
    return stage != "shard" and isinstance(error, InvalidInput | NotFound)
