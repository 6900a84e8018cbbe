"""A server that answers as Hugging Face's hub does, for one data set of parquet files."""

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlparse

DATASET = "me/digits"
_API, _FILES = f"/api/datasets/{DATASET}", f"/datasets/{DATASET}/resolve/main/"


class _Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = unquote(urlparse(self.path).path)
        if path.startswith(f"{_API}/tree/main"):
            self._json(self._inside(path.removeprefix(f"{_API}/tree/main").strip("/")))
        elif path.startswith(_API):
            self._json({"id": DATASET, "sha": "a" * 40, "private": False, "tags": []})
        elif path.startswith(_FILES):
            self._file(self.server.files[path.removeprefix(_FILES)])
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET  # noqa: N815 - so it is named

    def _inside(self, folder):
        prefix = folder and f"{folder}/"
        names = [name for name in self.server.files if name.startswith(prefix)]
        parts = {(name, name.removeprefix(prefix).partition("/")) for name in names}
        folders = {prefix + first for _, (first, below, _) in parts if below}
        files = [name for name, (_, below, _) in parts if not below]
        return [
            *({"type": "directory", "path": path, "oid": "0" * 40} for path in folders),
            *(
                {
                    "type": "file",
                    "path": path,
                    "oid": "0" * 40,
                    "size": len(self.server.files[path]),
                }
                for path in files
            ),
        ]

    def _file(self, data):
        head = {"ETag": '"0"', "X-Repo-Commit": "a" * 40}
        wanted = self.headers.get("Range", "")
        if not wanted:
            self._send(200, data, head)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        self._send(206, data[int(first) : int(last) + 1], head)

    def _json(self, facts):
        self._send(200, json.dumps(facts).encode(), {"Content-Type": "application/json"})

    def _send(self, status, body, head):
        self.send_response_only(status)
        for name, value in {**head, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments):
        """Says nothing."""


@contextmanager
def running_hub(files):
    """Yields the URL of a hub with these files, by name."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        server.files = files
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
