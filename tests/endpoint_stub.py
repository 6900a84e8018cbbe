"""A small server of embeddings over real HTTP, in the forms of several servers, which can fail."""

import base64
import contextlib
import hashlib
import io
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image

from tests.conftest import free_port

SIDE = 16
DIMENSION = 3 * SIDE * SIDE


def image_row(png, turn=0):
    """The pixels of a thumbnail, which `turn` moves along: another model."""
    image = Image.open(io.BytesIO(png)).convert("RGB").resize((SIDE, SIDE))
    return np.roll(np.asarray(image, np.float32).transpose(2, 0, 1).ravel(), turn)


def text_row(text, turn=0):
    digest = hashlib.shake_256(text.encode()).digest(DIMENSION)
    return np.roll(np.frombuffer(digest, np.uint8).astype(np.float32) - 127, turn)


class Stub:
    """failures: what the next requests get instead of rows: (status, headers, body) or a function
    of the rows that returns the body's rows. requests: (path, headers, body) of all so far.
    """

    def __init__(self, form="openai", *, texts=True, images=True, tls=None):
        """tls: the context of a server of https."""
        self.form, self.texts, self.images, self.tls = form, texts, images, tls
        self.port, self.turn, self.noise, self.sleep_s = free_port(), 0, 0.0, 0.0
        self.failures, self.requests, self.refuse = [], [], lambda _: None
        self.up()

    def url(self, **query):
        version = {"cohere": "v2", "tei": ""}.get(self.form, "v1")
        fields = "&".join(f"{name}={value}" for name, value in ({"size": SIDE} | query).items())
        scheme = "https" if self.tls else "http"
        return f"{self.form}+{scheme}://127.0.0.1:{self.port}/{version}?{fields}#org/Some-Model"

    def up(self):
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                status, headers, body = stub.answer(self.path, dict(self.headers), json.loads(raw))
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in {"Content-Length": len(content), **headers}.items():
                    self.send_header(name, str(value))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_): ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def process_request(self, request, address):
                stub.connections.append(request)
                super().process_request(request, address)

            def handle_error(self, *_): ...

        self.connections = []
        self._server = Server(("127.0.0.1", self.port), Handler)
        if self.tls:
            self._server.socket = self.tls.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def down(self):
        """Closes the port and every connection, as the kill of a server does."""
        self._server.shutdown()
        self._server.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def answer(self, path, headers, body):
        self.requests.append((path, headers, body))
        time.sleep(self.sleep_s)
        failure = self.failures.pop(0) if self.failures else None
        if isinstance(failure, tuple):
            return failure
        kind, contents = self.read(body)
        if not (self.texts if kind == "text" else self.images):
            return 400, {}, {"error": {"message": f"this model takes no {kind}"}}
        if any(map(self.refuse, contents)):
            return 422, {}, {"detail": "one of them is bad"}
        make = text_row if kind == "text" else image_row
        rows = [make(content, self.turn) for content in contents]
        noise = np.random.default_rng(len(self.requests))
        rows = [row + self.noise * np.linalg.norm(row) * unit(noise) for row in rows]
        return 200, {}, self.write(rows if failure is None else failure(rows), body)

    def read(self, body):
        """The kind of the items and the items, as PNG or as text."""
        kind, contents = READ[self.form](body)
        return kind, [*map(from_uri, contents)] if kind == "image" else contents

    def write(self, rows, body):
        if self.form == "tei":
            return [[*map(float, row)] for row in rows]
        if self.form == "cohere":
            return {"embeddings": {"float": [[*map(float, row)] for row in rows]}}
        entries = [{"index": i, "embedding": as_base64(row)} for i, row in enumerate(rows)]
        return {"object": "list", "data": entries[::-1], "model": body["model"]}


def read_openai(body):
    assert body.keys() == {"model", "input", "modality", "encoding_format"}
    return body["modality"], body["input"]


def read_vllm(body):
    (message,) = body["messages"]
    (part,) = message["content"]
    assert message["role"] == "user"
    is_text = part["type"] == "text"
    return ("text", [part["text"]]) if is_text else ("image", [part["image_url"]["url"]])


def read_tei(body):
    return "image" if body["inputs"][0].startswith("data:") else "text", body["inputs"]


def read_cohere(body):
    assert body["embedding_types"] == ["float"]
    is_image = body["input_type"] == "image"
    return ("image", body["images"]) if is_image else ("text", body["texts"])


def read_jina(body):
    kind = "text" if "text" in body["input"][0] else "image"
    head = "data:image/png;base64," if kind == "image" else ""  # Jina takes plain base64
    return kind, [head + item[kind] for item in body["input"]]


READ = {
    "openai": read_openai,
    "vllm": read_vllm,
    "tei": read_tei,
    "cohere": read_cohere,
    "jina": read_jina,
}


def unit(generator):
    row = generator.standard_normal(DIMENSION)
    return row / np.linalg.norm(row)


def as_base64(row):
    return base64.b64encode(np.asarray(row, "<f4").tobytes()).decode()


def from_uri(uri):
    head, _, payload = uri.partition(",")
    assert head == "data:image/png;base64"
    return base64.b64decode(payload, validate=True)
