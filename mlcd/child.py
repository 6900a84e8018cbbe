"""Child processes: how a child starts, exchanges messages with its parent, and ends with it.

Both sides write one JSON object per line, over the child's standard input and output.
An MlcdError of the child becomes a message, which the parent raises as its own.

Only the parent stops its child. A signal to a whole process group or cgroup reaches both at the
same time, but the parent needs its child to finish pending work. Therefore the child ignores the
signal until the parent ends it.
"""

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, Any, Final, Self, TypeAlias, cast

from mlcd import errors
from mlcd.errors import MlcdError
from mlcd.too_many_files import explain_open_files

Message: TypeAlias = dict[str, Any]

# Sent by a user, a service manager or a terminal to stop the parent.
STOPS: Final = (signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG: Final = 1  # <sys/prctl.h>
_REFUSED: Final = 2  # exit status after an MlcdError


def child_command(module: str) -> list[str]:
    """Returns the command line of `python -m module`, whose last argument is our process id."""
    # -P: no module is imported from the working directory, which belongs to the user
    return [sys.executable, "-P", "-m", module, str(os.getpid())]


@contextmanager
def block_stops() -> Iterator[None]:
    """Blocks the stop signals while a child is started: it inherits the block, so that no signal
    ends it before it ignores them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def to_line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def from_line(line: bytes) -> Message | None:
    """Returns a message of the child; None if the child ended within the line.

    Raises the child's error.
    """
    if not line.endswith(b"\n"):
        return None
    message: Message = json.loads(line)
    if "error" in message:
        kind: type[MlcdError] = getattr(errors, message["error"], MlcdError)
        raise kind(message["message"], remedy=message["remedy"])
    return message


def launch(module: str, *, descriptors: Sequence[int] = ()) -> "subprocess.Popen[bytes]":
    """Starts `python -m module`, which calls `serve_parent`; `Child.of` talks to it.

    Uses no event loop: uvloop's subprocesses support no process groups, and unblock the signals
    in the child. The child ends when the calling thread does. descriptors: file descriptors that
    the child inherits.
    """
    with block_stops():
        return subprocess.Popen(
            child_command(module),
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=descriptors,
            process_group=0,  # signals of a terminal reach only the parent
        )


class Child:
    """A child process in a group of its own, as its parent sees it. Create it with `start`."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        input_pipe: asyncio.WriteTransport,
        output: asyncio.StreamReader,
    ) -> None:
        """Takes a running process. input_pipe: writes to its standard input."""
        self._process, self._input, self._output = process, input_pipe, output
        self._loop = asyncio.get_running_loop()
        self._status: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(
            target=self._wait_for_exit, name=f"child-{process.pid}", daemon=True
        ).start()

    @classmethod
    async def start(cls, module: str, *, descriptors: Sequence[int] = ()) -> Self:
        """Starts `python -m module`, which calls `serve_parent`.

        Call it from the event loop's thread. See `launch`.
        """
        return await cls.of(launch(module, descriptors=descriptors))

    @classmethod
    async def of(cls, process: "subprocess.Popen[bytes]") -> Self:
        """Connects the running event loop with a process of `launch`."""
        loop, output = asyncio.get_running_loop(), asyncio.StreamReader()
        await loop.connect_read_pipe(
            partial(asyncio.StreamReaderProtocol, output), cast(IO[bytes], process.stdout)
        )
        input_pipe, _ = await loop.connect_write_pipe(
            asyncio.BaseProtocol, cast(IO[bytes], process.stdin)
        )
        return cls(process, input_pipe, output)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Message) -> None:
        self._input.write(to_line(message))

    async def receive(self) -> Message | None:
        """Returns the next message; None if the child has ended. Raises the child's error."""
        return from_line(await self._output.readline())

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def wait(self) -> int:
        """Waits for the end, and returns the exit status, negative for a signal."""
        return await asyncio.shield(self._status)

    async def end(self, *, patience_s: float = 0.0) -> None:
        """Closes the child's input; kills the child if it runs for `patience_s` more seconds."""
        self._input.close()
        try:
            async with asyncio.timeout(patience_s):
                await self.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.wait()

    def _wait_for_exit(self) -> None:
        status = self._process.wait()
        with suppress(RuntimeError):  # the loop has ended before the child
            self._loop.call_soon_threadsafe(self._status.set_result, status)


class Parent:
    """The parent process, as its child sees it. Iterating yields the parent's messages."""

    def __init__(self, *, at_its_end: signal.Signals) -> None:
        """Ignores the stop signals. at_its_end: see `serve_parent`."""
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, at_its_end)
        if os.getppid() != int(sys.argv[-1]):  # the parent died before prctl
            sys.exit(1)
        self._output = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # prints of libraries must not mix with messages

    def __iter__(self) -> Iterator[Message]:
        return map(json.loads, sys.stdin)

    def send(self, message: Message) -> None:
        """Sends a message. Ends this process if the parent no longer reads."""
        try:
            self._output.write(to_line(message))
            self._output.flush()
        except BrokenPipeError:
            with suppress(BrokenPipeError):
                self._output.close()  # otherwise Python flushes it again at exit
            sys.exit(1)


def serve_parent(
    work: Callable[[Message, Parent], None], *, at_its_end: signal.Signals = signal.SIGKILL
) -> None:
    """Runs `work` on the parent's first message; an MlcdError is raised in the parent.

    at_its_end: the signal that the system sends when the parent is killed.
    """
    parent = Parent(at_its_end=at_its_end)
    order = next(iter(parent), None)
    if order is None:  # the parent stopped while this process started
        return
    try:
        with explain_open_files():
            work(order, parent)
    except MlcdError as error:
        kind = type(error).__name__
        parent.send({"error": kind, "message": error.message, "remedy": error.remedy})
        sys.exit(_REFUSED)
