"""A web server on loopback that answers each path as a test says, well or badly."""

import contextlib
import socket
import threading
import time

FOREVER_S = 60


class ImageHost:
    """asked: path, and headers by lower-case name, of every request so far. most: requests answered
    at one time.
    """

    def __init__(self, answers, tls=None):
        """answers: path to bytes, or to a function that is given the connection. tls: an
        ssl.SSLContext.
        """
        self.answers, self.asked, self.most = answers, [], 0
        self._tls, self._now, self._lock = tls, 0, threading.Lock()
        self._stopped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._listener.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self):
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()
        return self

    def __exit__(self, *_):
        self._stopped.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # closed alone, it would be waited on for ever
        self._accepting.join()
        self._listener.close()

    @property
    def paths(self):
        return [path for path, _ in self.asked]

    def wait(self, seconds=FOREVER_S):
        """Waits like a slow host, and ends with the test."""
        self._stopped.wait(seconds)

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection):
        with contextlib.suppress(OSError, ValueError), connection:
            connection.settimeout(FOREVER_S)
            with (
                self._tls.wrap_socket(connection, server_side=True)
                if self._tls
                else connection as stream
            ):
                reader = stream.makefile("rb")
                while head := _read_head(reader):
                    reader.read(int(head[1].get("content-length", 0)))
                    self._answer(stream, *head)

    def _answer(self, stream, path, headers):
        with self._lock:
            self.asked.append((path, headers))
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            answer = self.answers.get(path, status(404))
            stream.sendall(answer) if isinstance(answer, bytes) else answer(stream)
        finally:
            with self._lock:
                self._now -= 1


def _read_head(reader):
    lines = []
    while line := reader.readline(65536).decode("latin-1").rstrip("\r\n"):
        lines.append(line)
    if not lines:
        return None
    fields = (line.partition(":") for line in lines[1:])
    return lines[0].split(" ")[1], {name.lower(): value.strip() for name, _, value in fields}


def ok(body, kind="image/png", **headers):
    """A whole answer; headers: with underscores for dashes, None leaves one out."""
    fields = {"Content-Type": kind, "Content-Length": len(body)}
    fields |= {name.replace("_", "-").title(): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in fields.items() if value is not None]
    return "\r\n".join(["HTTP/1.1 200 OK", *lines, "", ""]).encode() + body


def status(code):
    head = f"HTTP/1.1 {code} Whatever\r\nContent-Length: 6\r\nContent-Type: image/png\r\n\r\n"
    return head.encode() + b"SECRET"


def redirect(to, code=302):
    return f"HTTP/1.1 {code} Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode("latin-1")


def endless(head, piece, pause_s=0.0):
    """`head`, then `piece` again and again until the client has enough."""

    def answer(connection):
        connection.sendall(head)
        ends = time.monotonic() + FOREVER_S
        while time.monotonic() < ends:
            connection.sendall(piece)
            time.sleep(pause_s)

    return answer
