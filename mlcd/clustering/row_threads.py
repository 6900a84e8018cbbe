"""Runs a thread pool over the rows of a scan or the columns of sums, with single-threaded BLAS.

BLAS threads share each product, and idle while Python selects from it. Threads over rows multiply
and select at the same time. Their number is the number of BLAS threads, so a limit of BLAS
(OMP_NUM_THREADS, which torchrun sets) applies to them. A library loaded later brings its own BLAS
without a limit, so a server sets its budget here, with `allow_threads`.
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
    """Calls `work` on each item, in at most `allowed_threads()` threads."""
    # A request of one image is one item: it skips looking up the number of threads.
    num_threads = min(allowed_threads(), len(items)) if len(items) > 1 else 1
    if num_threads < 2:
        for item in items:
            work(item)
        return
    with limited_blas(), ThreadPoolExecutor(num_threads, initializer=_limit_openmp) as threads:
        for _ in threads.map(work, items):
            pass


def batches(num: int, *, most: int, least: int) -> list[slice]:
    """Divides `num` rows or columns into batches for threads; few are divided evenly.

    most: maximum size of a batch. least: minimum size that is worth a thread.
    """
    size = max(least, -(-num // allowed_threads())) if num > least else least
    size = min(most, size)
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]


def allow_threads(num_threads: int) -> None:
    """Limits the threads of scans, for the lifetime of this process."""
    _Limit.allowed = num_threads


def allowed_threads() -> int:
    """Returns the number of threads: the minimum of the BLAS threads, the cores and the limit of
    `allow_threads`.
    """
    with _Limit.lock:
        if _Limit.users == 0:
            _Limit.before = _threads_of_blas()
        return min(available_cores(), _Limit.before, _Limit.allowed)


def _threads_of_blas() -> int:
    """Returns the number of BLAS threads; the number of cores if BLAS cannot be inspected."""
    try:
        of_each = [library.num_threads for library in _libraries("blas")]
    except OSError:
        return available_cores()
    return max(of_each) if of_each else available_cores()


class _Limit:
    """The process-wide limit of BLAS to one thread, which ends with its last user."""

    lock = threading.Lock()
    users = 0
    held: Sequence[tuple[LibController, int]] = ()  # limited libraries, and their threads before
    before = 1  # the threads of BLAS before its first user
    allowed = sys.maxsize


@contextmanager
def limited_blas() -> Iterator[None]:
    """Limits every product of the process to one thread while any caller is inside."""
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
    """Sets the limit; returns the libraries and their previous numbers of threads.

    Returns none if too many open files prevent inspecting the libraries: then results are the same,
    but slower.
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
    """Works around threadpoolctl, which ignores all but the first thread that sets a limit."""
    OpenBLASController.clear_controlling_thread(force=True)


def _limit_openmp() -> None:
    """Limits OpenMP to one thread for the calling thread alone."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.get_num_threads()  # sets this thread's limit, at the first call only
    with suppress(OSError):  # too many open files: only slower
        for library in _libraries("openmp"):
            library.set_num_threads(1)


def _libraries(kind: Literal["blas", "openmp"]) -> list[LibController]:
    """Returns the loaded libraries, searched again once torch is loaded.

    Limits are set on each library: threadpoolctl's own limit queries all facts of all libraries.
    """
    with_torch = "torch" in sys.modules
    if with_torch not in _loaded:
        _loaded[with_torch] = ThreadpoolController().lib_controllers
    return [library for library in _loaded[with_torch] if library.user_api == kind]
