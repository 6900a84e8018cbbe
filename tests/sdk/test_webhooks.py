"""Webhooks by the client of OpenAI, unchanged: it registers them, and verifies and parses events.
The library of Standard Webhooks verifies them, too.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from tests.sdk.conftest import serving


@pytest.fixture(scope="module")
def receiver():
    """The messages that an endpoint received, headers and body of each, and its URL."""
    messages = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            messages.append((dict(self.headers), body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield messages, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def client(receiver, tmp_path_factory):
    folder = tmp_path_factory.mktemp("webhooks")
    settings = {"ALLOW": "127.0.0.1", "NETWORKS": "127.0.0.0/8"}
    settings["PORTS"] = receiver[1].strip("/").rpartition(":")[2]
    lines = [f"MLCD_WEBHOOKS__{name}={value}\n" for name, value in settings.items()]
    (folder / "settings").write_text("".join(lines))
    options = ("--state", folder / "state", "--config", folder / "settings")
    with (
        serving("pixels", *options) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client,
    ):
        yield client


def test_the_end_of_a_batch_is_unwrapped(client, receiver):
    messages, url = receiver
    kinds = ["batch.completed", "batch.failed"]
    webhook = client.webhooks.create(event_types=kinds, name="ends", url=url)
    file = client.files.create(file=b"no request\n", purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    deadline = time.monotonic() + 30
    while not messages:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    headers, body = messages.pop()
    event = client.webhooks.unwrap(body, headers, secret=webhook.signing_secret)
    assert isinstance(event, openai.types.webhooks.BatchFailedWebhookEvent)
    assert (event.data.id, event.object) == (batch.id, "event")
    assert event.created_at == client.batches.retrieve(batch.id).failed_at
    assert Webhook(webhook.signing_secret).verify(body, headers) == json.loads(body)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body + b" ", headers, secret=webhook.signing_secret)
    assert client.webhooks.delete(webhook.id).deleted


def test_secrets_rotate_and_every_event_can_be_tried(client, receiver):
    messages, url = receiver
    first = client.webhooks.create(event_types=["batch.completed"], name="a", url=url)
    second = client.webhooks.rotate_secret(first.id, keep_old_secret_active_for_24_hours=True)
    for kind in ("batch.completed", "batch.failed", "batch.expired", "batch.cancelled"):
        tried = client.webhooks.test(first.id, event_type=kind)
        assert (tried.status_code, tried.success) == (204, True)
        headers, body = messages.pop()
        for secret in (first.signing_secret, second.signing_secret):
            assert client.webhooks.unwrap(body, headers, secret=secret).type == kind
            Webhook(secret).verify(body, headers)
    client.webhooks.rotate_secret(first.id)
    client.webhooks.test(first.id, event_type="batch.completed")
    headers, body = messages.pop()
    with pytest.raises(WebhookVerificationError):
        Webhook(second.signing_secret).verify(body, headers)
    assert client.webhooks.update(first.id, name="b").name == "b"
    assert client.webhooks.retrieve(first.id).name == "b"
    assert [each.id for each in client.webhooks.list()] == [first.id]
    client.webhooks.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.webhooks.retrieve(first.id)
