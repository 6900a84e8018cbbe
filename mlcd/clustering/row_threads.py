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
from typing import Any, TypeVar

from threadpoolctl import OpenBLASController, ThreadpoolController

from mlcd.cores import available_cores

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_controllers: dict[bool, ThreadpoolController] = {}


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


def on_one_core(work: Callable[[], _Result]) -> _Result:
    """Does the work in a thread of its own and returns its result. As where threads share the rows,
    each library that is loaded has one thread.
    """
    with limited_blas(), ThreadPoolExecutor(1, initializer=_limit_openmp) as thread:
        return thread.submit(work).result()


def batches(num: int, *, most: int, least: int) -> list[slice]:
    """Returns the batches of so many rows, or columns, that threads share: evenly where there are
    few.

    most: those of a batch. least: those that are worth a thread.
    """
    each = max(least, -(-num // allowed_threads())) if num > least else least
    each = min(most, each)
    return [slice(start, min(start + each, num)) for start in range(0, num, each)]


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
        libraries = _controller().select(user_api="blas").lib_controllers
        of_each = [each.num_threads for each in libraries]  # `info` asks for much more
    except OSError:
        return available_cores()
    return max(of_each) if of_each else available_cores()


class _Limit:
    """The limit of one thread for BLAS: it is the process's, and ends with its last user."""

    lock = threading.Lock()
    users = 0
    held: Any = None
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
            if _Limit.users == 0 and _Limit.held is not None:
                _let_this_thread_set_limits()
                _Limit.held.restore_original_limits()


def _one_thread_of_blas() -> Any:
    """Returns the limit, set; None where the process cannot look at its libraries now, since it has
    too many open files: its answers are the same, and take longer.
    """
    try:
        libraries = _controller().select(user_api="blas")
    except OSError:
        return None
    _let_this_thread_set_limits()
    return libraries.limit(limits=1)


def _let_this_thread_set_limits() -> None:
    """Else threadpoolctl ignores, in silence, every thread but the first that set a limit."""
    OpenBLASController.clear_controlling_thread(force=True)


def _limit_openmp() -> None:
    """Limits OpenMP to one thread for the calling thread alone."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.get_num_threads()  # sets this thread's limit at its first call, and not again
    with suppress(OSError):  # too many open files: it only takes longer
        _controller().limit(limits=1, user_api="openmp")


def _controller() -> ThreadpoolController:
    """Returns the libraries that are loaded, looked up again when torch has joined them."""
    with_torch = "torch" in sys.modules
    if with_torch not in _controllers:
        _controllers[with_torch] = ThreadpoolController()
    return _controllers[with_torch]
