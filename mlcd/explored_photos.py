"""`mlcd explore` from Python, which runs the command in a separate process."""

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
_ERROR_PREFIX: Final = "mlcd: "  # of the command's error line
_STOP_TIMEOUT_S: Final = 30.0  # the server finishes the images that it is processing


class ExploredPhotos:
    """A server that explores photos and serves a page about them.

    The server stops when Python exits, at `stop`, or at the end of a `with` block; the next call
    resumes. Jupyter shows the page. url: URL of the page.
    """

    def __init__(self, url: str, server: "subprocess.Popen[str]") -> None:
        """server: the command, after it printed its URL; its further output is discarded."""
        self.url, self._server = url, server
        assert server.stdout is not None
        self._drain_thread = threading.Thread(target=_drain, args=(server.stdout,), daemon=True)
        self._drain_thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stops the server if `explore` started it; a second call does nothing."""
        atexit.unregister(self.stop)
        if self._server.poll() is None:
            self._server.send_signal(signal.SIGINT)
            try:
                self._server.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
        self._server.wait()
        self._drain_thread.join()

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
    """Starts a page about photos in a folder, glob, tar shards, parquet, zip, or a URL of these.

    Returns as soon as the page answers; photos appear on it while they are processed. clusters:
    number of groups; by default chosen from the photos. state: folder to keep results in; by
    default in the user's cache. port: another free port is used if it is taken. Raises MlcdError
    with the command's error line if it cannot start.
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
        start_new_session=True,  # Ctrl-C in Python or Jupyter must not stop it
    )
    assert server.stdout is not None
    last_line = ""
    for line in server.stdout:
        if match := _URL.match(line):
            return ExploredPhotos(match[1], server)
        last_line = line.strip() or last_line
    server.stdout.close()
    server.wait()
    raise MlcdError(last_line.removeprefix(_ERROR_PREFIX) or "mlcd explore ended without a message")


def _drain(output: IO[str]) -> None:
    """Reads and discards the output, so that the server does not block on a full pipe."""
    with output:
        for _ in output:
            pass
