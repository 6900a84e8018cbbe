"""Threads that share the rows of a scan, or the columns of sums, each with the libraries of linear
algebra to itself.

A library's own threads share each product, and wait while Python selects from it. Threads over rows
multiply and select at the same time. They are as many as BLAS may have, so whoever limits it
(OMP_NUM_THREADS, which torchrun sets) limits them. A library that is loaded later has a BLAS of its
own without a limit, so a server's budget is said here, by `allow_threads`.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Literal, TypeVar

from threadpoolctl import LibController, OpenBLASController, ThreadpoolController

from mlcd.cores import available_cores

_Item = TypeVar("_Item")
_loaded: dict[bool, list[LibController]] = {}


def in_threads(work: Callable[[_Item], object], items: Sequence[_Item]) -> None:
    """Does the work on each item, by as many threads as `allowed_threads` says."""
    # A request of one image is one item: it does not wait until the machine is asked.
    num_threads = min(allowed_threads(), len(items)) if len(items) > 1 else 1
    if num_threads < 2:
        for item in items:
            work(item)
        return
    with limited_blas(), ThreadPoolExecutor(num_threads, initializer=_limit_openmp) as threads:
        for _ in threads.map(work, items):
            pass


def batches(num: int, *, most: int, least: int) -> list[slice]:
    """Returns the batches of so many rows, or columns, that threads share: evenly where there are
    few.

    most: those of a batch. least: those that are worth a thread.
    """
    size = max(least, -(-num // allowed_threads())) if num > least else least
    size = min(most, size)
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]


def allow_threads(num_threads: int) -> None:
    """Gives the scans of this process no more threads than these, for its life."""
    _Limit.allowed = num_threads


def allowed_threads() -> int:
    """Returns the threads that BLAS may have in this process, but no more than there are cores or
    than are allowed.
    """
    with _Limit.lock:
        if _Limit.users == 0:
            _Limit.before = _threads_of_blas()
        return min(available_cores(), _Limit.before, _Limit.allowed)


def _threads_of_blas() -> int:
    """Returns as many as there are cores where the process cannot look at its libraries now."""
    try:
        of_each = [library.num_threads for library in _libraries("blas")]
    except OSError:
        return available_cores()
    return max(of_each) if of_each else available_cores()


class _Limit:
    """The limit of one thread for BLAS: it is the process's, and ends with its last user."""

    lock = threading.Lock()
    users = 0
    held: Sequence[tuple[LibController, int]] = ()  # limited libraries, and their threads before
    before = 1  # the threads of BLAS before its first user
    allowed = sys.maxsize


@contextmanager
def limited_blas() -> Iterator[None]:
    """Gives every product of the process one thread while at least one caller is inside."""
    with _Limit.lock:
        if _Limit.users == 0:
            _Limit.before = _threads_of_blas()
            _Limit.held = _one_thread_of_blas()
        _Limit.users += 1
    try:
        yield
    finally:
        with _Limit.lock:
            _Limit.users -= 1
            if _Limit.users == 0:
                _set_threads(_Limit.held)


def _one_thread_of_blas() -> list[tuple[LibController, int]]:
    """Sets the limit, and returns the libraries and the threads that each had; none where the
    process cannot look at its libraries now, since it has too many open files: its answers are the
    same, and take longer.
    """
    try:
        libraries = _libraries("blas")
    except OSError:
        return []
    before = [(library, library.num_threads) for library in libraries]
    _set_threads([(library, 1) for library in libraries])
    return before


def _set_threads(threads_of: Sequence[tuple[LibController, int]]) -> None:
    _let_this_thread_set_limits()
    for library, num_threads in threads_of:
        library.set_num_threads(num_threads)


def _let_this_thread_set_limits() -> None:
    """Else threadpoolctl ignores, in silence, every thread but the first that set a limit."""
    OpenBLASController.clear_controlling_thread(force=True)


def _limit_openmp() -> None:
    """Limits OpenMP to one thread for the calling thread alone."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.get_num_threads()  # sets this thread's limit at its first call, and not again
    with suppress(OSError):  # too many open files: it only takes longer
        for library in _libraries("openmp"):
            library.set_num_threads(1)


def _libraries(kind: Literal["blas", "openmp"]) -> list[LibController]:
    """Returns the libraries that are loaded, looked up again when torch has joined them.

    A limit is set on each by itself: threadpoolctl's own asks all for all that they can tell.
    """
    with_torch = "torch" in sys.modules
    if with_torch not in _loaded:
        _loaded[with_torch] = ThreadpoolController().lib_controllers
    return [library for library in _loaded[with_torch] if library.user_api == kind]
