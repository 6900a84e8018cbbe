"""`mlcd jobs` says which server it asked, and takes it wherever it is given."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlcd.errors import MlcdError
from mlcd.service.jobs.cli import jobs
from tests.conftest import free_port

COMMANDS = {"submit": ["in", "out"], "list": [], "show": ["j"], "failures": ["j"], "cancel": ["j"]}
COMMANDS |= {
    "retry": ["j"],
    "watch": ["j"],
    "download": ["j"],
    "webhook-test": ["https://a.example/"],
}


@pytest.fixture(scope="module")
def asked():
    """The bodies of the requests to the server that refuses all of them, from the first on."""
    return []


@pytest.fixture(scope="module")
def refusing(asked):
    """The URL of a server that refuses all requests."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            content = json.dumps(
                {"type": "urn:mlcd:problem:conflict", "detail": "jobs are off"}
            ).encode()
            asked.append(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            self.send_response(409)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = answer  # noqa: N815 - the library's names

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def error_of(*arguments):
    found = CliRunner().invoke(jobs, arguments)
    assert isinstance(found.exception, MlcdError), found.output
    return str(found.exception)


def test_all_commands_are_tried():
    assert set(COMMANDS) == set(jobs.commands)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_the_server_before_and_after_it_and_its_refusals_name_it(
    refusing, name
):
    for arguments in (
        ["--url", refusing, name, *COMMANDS[name]],
        [name, *COMMANDS[name], "--url", refusing],
    ):
        assert error_of(*arguments).startswith(f"{refusing}: jobs are off (status 409")


def test_a_server_that_is_not_there_is_named(refusing):
    url = f"http://127.0.0.1:{free_port()}"
    error = f"the server at {url} cannot be reached: start it with `mlcd serve`, or give its URL"
    assert error_of("list", "--url", url) == error
    assert error_of("--url", refusing, "list", "--url", url) == error
    started = time.monotonic()
    assert error_of("watch", "0660d12b9abb7f1c1e25", "--url", url) == error
    assert time.monotonic() - started < 3


def test_paths_of_a_job_are_made_absolute_and_urls_stay(refusing, asked):
    submit = ("submit", "--url", refusing)
    error_of(*submit, "in/*.tar", "s3://bucket/out/")
    sent = json.loads(asked[-1])
    assert (sent["input"], sent["output"]) == (str(Path.cwd() / "in/*.tar"), "s3://bucket/out/")
    before = len(asked)
    assert "write s3://, or ./s3:/bucket/in" in error_of(*submit, "s3:/bucket/in", "out")
    assert "the s3:// URL must not contain a password" in error_of(
        *submit, "in", "s3://me:hush@bucket/out"
    )
    assert len(asked) == before
