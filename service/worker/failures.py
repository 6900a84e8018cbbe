"""The errors that end a task early, and the part of each that is safe to show to its owner."""

import sys
from typing import Final

from mlcd.errors import (
    ArtifactInvalid,
    ConfigInvalid,
    DiskFull,
    InvalidInput,
    MlcdError,
    NotFound,
)
from mlcd.locations import show_location
from mlcd.pipelines.shard import InputChanged, NotRemoved, OtherSettings, OutputGone
from mlcd.service.errors import OutsideRoots
from mlcd.service.jobs.job import JobProblem, Stage, printable
from mlcd.service.jobs.roots import OtherRoots, PlaceMoved
from mlcd.service.telemetry.logs import kinds
from mlcd.service.worker.upload_results import OtherFiles

_RETRY: Final = "fix the cause, then retry the job"
_OWN_MODULES: Final = "mlcd."
_MAX_FRAMES: Final = 6


class Stopped(Exception):
    """Ends the task without success or failure; the queue leases it again."""


class EngineDown(Exception):
    """The engine is busy, or fails even on a blank image, so the task is not the cause."""


class OtherCenters(ConfigInvalid):
    """The job was submitted for other centers than the worker's."""

    name = "other-centers"


_ABOUT_THE_JOB: Final = (
    InputChanged,
    NotRemoved,
    OtherCenters,
    OtherFiles,
    OtherRoots,
    PlaceMoved,
    OtherSettings,
    OutputGone,
)


def problem_of(error: BaseException) -> JobProblem:
    """Returns the part of an error that the job shows to its owner, in printable characters.

    Only paths of the job's own input and output are shown; everything else is for the log.
    """
    problem = _problem_of(error)
    return JobProblem(
        problem.code,
        printable(show_location(problem.message)),
        problem.remedy and printable(show_location(problem.remedy)),
    )


def reason_of(error: BaseException) -> str:
    """Returns the reason for the log: the text of our own errors, and the type of any other."""
    return printable(str(error)) if isinstance(error, MlcdError) else kinds(error)


def _problem_of(error: BaseException) -> JobProblem:
    if isinstance(error, DiskFull):
        return JobProblem("disk-full", error.message, "free space, then retry the job")
    if isinstance(error, _ABOUT_THE_JOB):
        return JobProblem(error.name, error.message, error.remedy)
    if isinstance(error, ConfigInvalid | ArtifactInvalid):
        return JobProblem(
            "worker-misconfigured", "a worker cannot do this job; its log says why", _RETRY
        )
    if isinstance(error, MlcdError):
        return JobProblem(error.name, error.message, error.remedy or _RETRY)
    return JobProblem("internal-error", "a worker failed on this task; its log says where", _RETRY)


def describe_stall(seconds: float) -> JobProblem:
    """Returns the problem of a worker that made no progress for `seconds`."""
    return JobProblem(
        "stalled",
        f"a worker hung on this shard for {seconds:g} s and ended; its log says where",
        _RETRY,
    )


def is_misfit(error: BaseException) -> bool:
    """Tells whether only this worker is unsuited for the job; others may be able to do it."""
    return isinstance(error, OtherCenters | OtherFiles | OtherRoots | OtherSettings)


def is_fatal(error: BaseException, stage: Stage) -> bool:
    """Tells whether all other tasks of the job would fail for the same reason."""
    if isinstance(error, DiskFull | InputChanged | OutputGone | PlaceMoved | ConfigInvalid):
        return True
    return stage != "shard" and isinstance(error, InvalidInput | NotFound | OutsideRoots)


def line_of(thread: int | None) -> str:
    """Returns modules and lines of mlcd in a thread's stack, outermost first."""
    lines, frame = [], sys._current_frames().get(thread or 0)  # noqa: SLF001 - documented
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "?"))
        if name.startswith(_OWN_MODULES):
            lines.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return " > ".join(reversed(lines[:_MAX_FRAMES]))
