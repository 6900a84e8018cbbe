"""`mlcd explore` from Python: the command in a process of its own."""

import atexit
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from mlcd.errors import MlcdError
from mlcd.locations import Location

_URL: Final = re.compile(r"(?:already open: )?(https?://\S+)")
_PREFIX: Final = "mlcd: "  # how the command's error begins
_END_S: Final = 30.0  # for the pictures that are being looked at


class ExploredPhotos:
    """The page of a place of pictures, and the server that makes and serves it.

    It ends with Python, at `stop`, or at the end of a `with`; nothing is lost, and the next call
    goes on. In Jupyter it shows the page. url: of the page.
    """

    def __init__(self, url: str, server: "subprocess.Popen[str]") -> None:
        """server: the command, which has written its URL; what it writes from now on is dropped."""
        self.url, self._server = url, server
        assert server.stdout is not None
        self._drained = threading.Thread(target=_drain, args=(server.stdout,), daemon=True)
        self._drained.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Ends the server; a second call does nothing. One that was open before stays."""
        atexit.unregister(self.stop)
        if self._server.poll() is None:
            self._server.send_signal(signal.SIGINT)
            try:
                self._server.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
        self._server.wait()
        self._drained.join()

    def __repr__(self) -> str:
        return f"<photos at {self.url}>"

    def _repr_html_(self) -> str:
        return f'<iframe src="{self.url}" width="100%" height="640"></iframe>'

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.stop()


def explore(
    photos: Location,
    *,
    model: Location = "starter",
    clusters: int | None = None,
    state: Location | None = None,
    port: int = 8000,
) -> ExploredPhotos:
    """Starts the page of a folder, glob, tar shards, parquet, zip, or a URL of these, and returns
    once it answers; the pictures appear while they are looked at.

    clusters: number of groups; chosen by the pictures without it. state: where it is kept, without
    it in the user's cache. port: a free one is taken where it is in use. Raises MlcdError with the
    line of the command where it cannot start.
    """
    command = ["explore", os.fspath(photos), "--model", os.fspath(model), "--no-browser"]
    command += ["--port", str(port)]
    if clusters is not None:
        command += ["--clusters", str(clusters)]
    if state is not None:
        command += ["--state", str(Path(state))]
    server = subprocess.Popen(
        [sys.executable, "-m", "mlcd", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C in Python or Jupyter is not for it
    )
    assert server.stdout is not None
    last = ""
    for line in server.stdout:
        if match := _URL.match(line):
            return ExploredPhotos(match[1], server)
        last = line.strip() or last
    server.stdout.close()
    server.wait()
    raise MlcdError(last.removeprefix(_PREFIX) or "mlcd explore ended without a word")


def _drain(output: IO[str]) -> None:
    """Reads what nobody sees, so that the server never waits for a reader."""
    with output:
        for _ in output:
            pass
