"""A real HTTP server on loopback that answers as a script says, and remembers what it was asked."""

import contextlib
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Reply:
    """drop: close the connection without an answer. wait_s: before it. drip_s: between the bytes of its body."""

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    drop: bool = False
    wait_s: float = 0
    drip_s: float = 0


@dataclass(frozen=True)
class Asked:
    at: float
    path: str
    headers: dict[str, str]
    body: bytes


@contextlib.contextmanager
def scripted(*replies):
    """Its URL and the list of what it was asked; the last reply is for all that follow."""
    script, asked = list(replies), []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            reply = script[min(len(asked), len(script) - 1)]
            asked.append(
                Asked(
                    time.monotonic(),
                    self.path,
                    {k.lower(): v for k, v in self.headers.items()},
                    body,
                )
            )
            stop.wait(reply.wait_s)
            if reply.drop or stop.is_set():
                self.close_connection = True
                return
            with contextlib.suppress(OSError):
                self._answer(reply)

        def do_GET(self):
            self.do_POST()

        def _answer(self, reply):
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            for i in range(0, len(reply.body), 1 if reply.drip_s else 2**20):
                self.wfile.write(reply.body[i : i + (1 if reply.drip_s else 2**20)])
                stop.wait(reply.drip_s)

        def log_message(self, *args):
            pass

    stop = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            stop.set()
            server.shutdown()
            thread.join()
