"""A real browser without a screen, told over its debugging protocol, that can reach this machine
and nothing else.
"""

import base64
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
_LOAD_S = 60
_ONLY_HERE = ("MAP * ~NOTFOUND", "EXCLUDE 127.0.0.1", "EXCLUDE localhost")


@contextlib.contextmanager
def browsing(program: str, folder: Path, *, names: Mapping[str, str] | None = None):
    """A page of a browser that keeps all of its own in `folder`. names: addresses of hosts that it
    is told.
    """
    known = [f"MAP {name} {address}" for name, address in (names or {}).items()]
    command = [
        program,
        "--headless=new",
        "--use-angle=swiftshader",  # WebGL2 without a GPU
        "--enable-unsafe-swiftshader",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--host-resolver-rules={', '.join([*known, *_ONLY_HERE])}",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "--lang=en",
        *(["--no-sandbox"] if os.getuid() == 0 else []),
        "about:blank",
    ]
    browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = _address(browser, folder / "DevToolsActivePort")
        # A busy machine keeps a browser from answering pings; each answer is awaited in any case.
        with connect(address, max_size=None, ping_interval=None) as socket:
            yield Page(socket, browser.pid)
    finally:
        browser.terminate()
        browser.wait(timeout=_LOAD_S)


def _address(browser: "subprocess.Popen[bytes]", port_file: Path) -> str:
    """Returns the address of its page's debugger."""
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
    """problems: errors and warnings of the console, and exceptions. urls: all that it asked for.

    process: the id of the browser's first process.
    """

    def __init__(self, socket: ClientConnection, process: int) -> None:
        self._socket = socket
        self.process = process
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
        opened = self.ask("Page.navigate", url=url)
        assert "errorText" not in opened, opened
        if "loaderId" not in opened:  # a place in the page that is open
            return
        deadline = time.monotonic() + _LOAD_S
        while not self._loaded:
            assert time.monotonic() < deadline, f"{url} did not load"
            self.value("0")  # what has happened meanwhile is heard with the answer
            time.sleep(0.05)

    def value(self, expression: str):
        """Returns the value of JavaScript; it waits for a promise's value."""
        found = self.ask(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str):
        """Returns the value once it is true; for an element of the page, true."""
        awaited = f"(async () => {{ const found = await ({expression}); return found instanceof Node || found; }})()"
        deadline = time.monotonic() + _LOAD_S
        while not (found := self.value(awaited)):
            assert time.monotonic() < deadline, (
                f"{expression} never came; problems: {self.problems}"
            )
            time.sleep(0.05)
        return found

    def shows(self, text: str, *, within: str = "main"):
        """Waits until a part of the page shows a text."""
        place = f"document.querySelector({json.dumps(within)})"
        return self.until(f"{place}?.textContent.includes({json.dumps(text)})")

    def count(self, selector: str) -> int:
        return self.value(f"document.querySelectorAll({json.dumps(selector)}).length")

    def click(self, selector: str, text: str | None = None) -> None:
        """Clicks, with a mouse, on the first such element, or on the first that has the text or
        the label.
        """
        found = (
            f"[...document.querySelectorAll({json.dumps(selector)})].find(e => "
            f"{json.dumps(text)} === null || e.textContent.includes({json.dumps(text)})"
            f" || e.getAttribute('aria-label') === {json.dumps(text)})"
        )
        self.until(f"{found} && !{found}.disabled && {found}.getClientRects().length")
        middle = (
            f"(e => {{ e?.scrollIntoView({{block: 'center'}}); const b = e?.getBoundingClientRect();"
            f" return b && [b.x + b.width / 2, b.y + b.height / 2]; }})({found})"
        )
        two_frames = "new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))"
        deadline = time.monotonic() + _LOAD_S
        at = None
        # What the page draws meanwhile moves the element away from under the mouse.
        while at != (now := self.until(f"{two_frames}.then(() => {middle})")):
            assert time.monotonic() < deadline, f"{selector} never stood still"
            at = now
            self.mouse("mouseMoved", at)
        self.mouse("mousePressed", at)
        self.mouse("mouseReleased", at)

    def mouse(self, kind: str, at: tuple[float, float], **more) -> None:
        pressed = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.ask("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], **(pressed | more))

    def drag(self, *places: tuple[float, float]) -> None:
        self.mouse("mousePressed", places[0])
        for place in places[1:]:
            self.mouse("mouseMoved", place, button="left", buttons=1)
        self.mouse("mouseReleased", places[-1])

    def press(self, key: str, code: int = 0, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            self.ask(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                windowsVirtualKeyCode=code,
                **({"text": text} if text and kind == "keyDown" else {}),
            )

    def type(self, selector: str, text: str) -> None:
        """Types into a field, once it is empty."""
        self.until(f"document.querySelector({json.dumps(selector)})?.value === ''")
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        self.ask("Input.insertText", text=text)

    def choose(self, selector: str, file: Path) -> None:
        """Chooses a file, for an input of the page."""
        self.until(f"document.querySelector({json.dumps(selector)})")
        root = self.ask("DOM.getDocument")["root"]["nodeId"]
        node = self.ask("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.ask("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

    def drop(self, *paths: Path) -> None:
        """Drops files and folders of this machine onto the page."""
        data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.ask("Input.dispatchDragEvent", type=kind, x=200, y=300, data=data)

    def resize(self, width: int, height: int, *, scale: float = 1) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def shade(self, scheme: str) -> None:
        """Prefers light or dark, as the system's setting would."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.ask("Emulation.setEmulatedMedia", features=[feature])

    def downloads_into(self, folder: Path) -> None:
        self.ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    def screenshot(self, path: Path, quality: int = 82) -> None:
        taken = self.ask("Page.captureScreenshot", format="webp", quality=quality)
        path.write_bytes(base64.b64decode(taken["data"]))

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
            entry = said["entry"]
            self.problems.append(f"{entry['text']} {entry.get('url', '')}".rstrip())
