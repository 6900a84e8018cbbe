"""A real browser without a screen, told over its debugging protocol, that can reach this machine and nothing else."""

import contextlib
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from websockets.sync.client import ClientConnection, connect

_SAID = ("error", "warning")
_LOAD_S = 30


@contextlib.contextmanager
def browsing(program: str, folder: Path, *, names: Mapping[str, str] | None = None):
    """A page of a browser that keeps all of its own in `folder`. names: addresses of hosts that it is told."""
    known = [f"MAP {name} {address}" for name, address in (names or {}).items()]
    command = [
        program,
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--host-resolver-rules={', '.join([*known, 'MAP * ~NOTFOUND', 'EXCLUDE 127.0.0.1', 'EXCLUDE localhost'])}",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        *(["--no-sandbox"] if os.getuid() == 0 else []),
        "about:blank",
    ]
    browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with connect(_address(browser, folder / "DevToolsActivePort"), max_size=None) as socket:
            yield Page(socket)
    finally:
        browser.terminate()
        browser.wait(timeout=_LOAD_S)


def _address(browser: "subprocess.Popen[bytes]", port_file: Path) -> str:
    """Of its page's debugger."""
    deadline = time.monotonic() + _LOAD_S
    while True:
        assert time.monotonic() < deadline, "the browser did not start"
        assert browser.poll() is None, "the browser ended"
        if port_file.is_file() and (port := port_file.read_text().partition("\n")[0]):
            with urllib.request.urlopen(
                f"http://127.0.0.1:{port}/json/list", timeout=_LOAD_S
            ) as answer:
                pages = [target for target in json.load(answer) if target["type"] == "page"]
            if pages:
                return pages[0]["webSocketDebuggerUrl"]
        time.sleep(0.05)


class Page:
    """problems: errors and warnings of the console, and exceptions. urls: all that it asked for."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._num = 0
        self._loaded = False
        self.problems: list[str] = []
        self.urls: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters):
        self._num += 1
        self._socket.send(json.dumps({"id": self._num, "method": method, "params": parameters}))
        while (message := json.loads(self._socket.recv(timeout=_LOAD_S))).get("id") != self._num:
            self._heard(message["method"], message["params"])
        assert "error" not in message, message
        return message["result"]

    def open(self, url: str) -> None:
        self.problems, self.urls, self._loaded = [], [], False
        assert "errorText" not in self.ask("Page.navigate", url=url)
        deadline = time.monotonic() + _LOAD_S
        while not self._loaded:
            assert time.monotonic() < deadline, f"{url} did not load"
            self.value("0")  # what has happened meanwhile is heard with the answer
            time.sleep(0.05)

    def value(self, expression: str):
        """Of JavaScript; a promise's is waited for."""
        found = self.ask(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str):
        deadline = time.monotonic() + _LOAD_S
        while not (found := self.value(expression)):
            assert time.monotonic() < deadline, (
                f"{expression} never came; problems: {self.problems}"
            )
            time.sleep(0.05)
        return found

    def choose(self, selector: str, file: Path) -> None:
        """A file, for an input of the page."""
        root = self.ask("DOM.getDocument")["root"]["nodeId"]
        node = self.ask("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.ask("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

    def _heard(self, method: str, said) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.urls.append(said["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(said["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled" and said["type"] in _SAID:
            self.problems.append(str(said["args"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in _SAID:
            self.problems.append(said["entry"]["text"])
