"""Webhooks of a real server, and the receivers that they reach or do not."""

import base64
import contextlib
import hashlib
import hmac
import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from mlcd.service.jobs.job import JobProblem
from mlcd.service.jobs.service import open_queue
from mlcd.service.keys.file import create_key, revoke_key
from mlcd.service.settings import read_settings
from tests.conftest import call_mlcd, free_port, write_digits
from tests.integration.running import Server, asking, children, exists, until
from tests.integration.test_batches import begin, request_lines, to_jsonl, wait_ended

ROUTE = "/v1/webhook_endpoints"
SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()


class Receiver:
    """An endpoint on loopback. messages: headers and body of every request, from the first on.

    answers: the statuses of the next answers, then 204; a text is the place of a redirect.
    """

    def __init__(self, port=0):
        self.messages, self.answers = [], []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.messages.append((dict(self.headers), body))
                answer = receiver.answers.pop(0) if receiver.answers else 204
                self.send_response(302 if isinstance(answer, str) else answer)
                if isinstance(answer, str):
                    self.send_header("Location", answer)
                self.send_header("Retry-After", "0")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}/hook?token=SECRET"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    @property
    def events(self):
        return [json.loads(body) for _, body in self.messages]

    @property
    def types(self):
        return [event["type"] for event in self.events]


def is_signed(message, secret):
    """Checks a message by the text of Standard Webhooks."""
    headers, body = message
    assert abs(time.time() - int(headers["webhook-timestamp"])) < 60
    content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(secret[len("whsec_") :])
    made = base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
    return f"v1,{made}" in headers["webhook-signature"].split(" ")


def allowing(*ports):
    return {
        "webhooks__allow": "127.0.0.1",
        "webhooks__networks": "127.0.0.0/8",
        "webhooks__ports": ",".join(map(str, ports)),
    }


def register(client, url, **fields):
    answer = client.post(ROUTE, json={"url": url, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def run_batch(client, **kwargs):
    return wait_ended(client, begin(client, to_jsonl(request_lines(3))), **kwargs)


@pytest.fixture(scope="module")
def receiver():
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def client(receiver, tmp_path_factory):
    with asking(
        "pixels", state_dir=tmp_path_factory.mktemp("state"), **allowing(receiver.port, 1)
    ) as (_, client):
        yield client


@pytest.fixture
def hook(client, receiver):
    receiver.messages.clear()
    webhook = register(client, receiver.url)
    yield webhook
    client.delete(f"{ROUTE}/{webhook['id']}")


def test_a_batch_is_told_once_signed_and_in_the_shape_of_openai(client, receiver, hook):
    batch = run_batch(client)
    until(lambda: receiver.messages, 10)
    time.sleep(1.5)
    ((headers, body),) = receiver.messages
    assert is_signed((headers, body), hook["signing_secret"])
    event = json.loads(body)
    assert event == {
        "id": headers["webhook-id"],
        "object": "event",
        "created_at": batch["completed_at"],
        "type": "batch.completed",
        "data": {"id": batch["id"]},
    }
    (shown,) = client.get(ROUTE).json()["data"]
    assert (shown["waiting"], shown["status"]) == (0, "enabled")
    assert "signing_secret" not in shown
    last = shown["last_delivery"]
    assert (last["event_id"], last["status"], last["status_code"]) == (
        event["id"],
        "delivered",
        204,
    )
    assert client.get(f"{ROUTE}/{hook['id']}").json() == shown


def test_only_the_events_that_were_asked_for_are_sent(client, receiver, hook):
    changed = client.post(f"{ROUTE}/{hook['id']}", json={"event_types": ["batch.failed"]}).json()
    assert (changed["event_types"], changed["url"]) == (["batch.failed"], receiver.url)
    run_batch(client)
    failed = wait_ended(client, begin(client, b"no request\n"))
    until(lambda: receiver.messages, 10)
    assert [(event["type"], event["data"]["id"]) for event in receiver.events] == [
        ("batch.failed", failed["id"])
    ]


def test_a_refusal_is_followed_by_another_attempt_with_the_same_id(client, receiver, hook):
    receiver.answers = [500]
    run_batch(client)
    until(lambda: len(receiver.messages) == 2, 20)
    assert len({headers["webhook-id"] for headers, _ in receiver.messages}) == 1
    assert len({body for _, body in receiver.messages}) == 1
    assert all(is_signed(message, hook["signing_secret"]) for message in receiver.messages)
    state = lambda: client.get(f"{ROUTE}/{hook['id']}").json()["last_delivery"]  # noqa: E731
    until(lambda: state()["status"] == "delivered", 5)
    assert state()["attempts"] == 2


def test_a_redirect_is_not_followed(client, receiver, hook):
    with Receiver() as inside:
        receiver.answers = [inside.url, inside.url]
        answer = client.post(f"{ROUTE}/{hook['id']}/test").json()
        assert (answer["status_code"], receiver.types) == (302, ["webhook.test"])
        assert inside.messages == []


def test_a_receiver_that_is_gone_disables_its_webhook(client, receiver, hook):
    receiver.answers = [410]
    run_batch(client)
    url = f"{ROUTE}/{hook['id']}"
    until(lambda: client.get(url).json()["status"] == "disabled", 10)
    shown = client.get(url).json()
    assert (shown["waiting"], shown["last_delivery"]["status"]) == (0, "given_up")
    run_batch(client)
    assert client.get(url).json()["waiting"] == 0
    assert client.post(url, json={"name": "again"}).json()["status"] == "enabled"
    run_batch(client)
    until(lambda: len(receiver.messages) == 2, 10)


def test_a_secret_is_replaced_at_once_or_after_a_day(client, receiver, hook):
    first, url = hook["signing_secret"], f"{ROUTE}/{hook['id']}"
    keep = {"keep_old_secret_active_for_24_hours": True}
    second = client.post(f"{url}/rotate_secret", json=keep).json()["signing_secret"]
    client.post(f"{url}/test")
    third = client.post(f"{url}/rotate_secret").json()["signing_secret"]
    client.post(f"{url}/test")
    both, last = receiver.messages
    assert len({first, second, third}) == 3
    assert [is_signed(both, each) for each in (first, second, third)] == [True, True, False]
    assert [is_signed(last, each) for each in (first, second, third)] == [False, False, True]
    assert len(both[0]["webhook-signature"].split(" ")) == 2


def test_a_test_names_the_event_and_says_what_is_wrong(client, receiver, hook):
    url = f"{ROUTE}/{hook['id']}"
    answer = client.post(f"{url}/test", json={"event_type": "batch.completed"})
    assert answer.json() == {
        "object": "webhook_endpoint.test",
        "webhook_endpoint_id": hook["id"],
        "event_type": "batch.completed",
        "status_code": 204,
        "success": True,
    }
    assert receiver.types == ["batch.completed"]
    client.post(url, json={"url": "http://127.0.0.1:1/"})
    refused = client.post(f"{url}/test")
    assert refused.status_code == 422
    assert "could not be reached" in refused.json()["error"]["message"]


def test_the_command_tells_what_the_receiver_answers(client, receiver, hook):
    def run(*arguments):
        done = call_mlcd("jobs", "webhook-test", *arguments, "--url", client.base_url)
        return done.returncode, done.stdout + done.stderr

    assert run(receiver.url) == (0, "the receiver answered 204\n")
    receiver.answers = [401]
    assert run(receiver.url, "--secret", SECRET) == (1, "the receiver answered 401\n")
    by_webhook, by_secret = receiver.messages
    assert is_signed(by_webhook, hook["signing_secret"])
    assert is_signed(by_secret, SECRET)
    status, told = run("https://127.0.0.1/")
    assert (status, "MLCD_WEBHOOKS__ALLOW" in told) == (2, True)
    assert [each["id"] for each in client.get(ROUTE).json()["data"]] == [hook["id"]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"url": "http://localhost/"}, "url"),
        ({"url": "http://127.0.0.1:22/"}, "url"),
        ({"url": "https://127.0.0.1/"}, "url"),
        ({"url": "ftp://127.0.0.1/"}, "url"),
        ({"url": "http://user:word@127.0.0.1:1/"}, "url"),
        ({"url": "http://127.0.0.1:1/", "event_types": []}, "event_types"),
        ({"url": "http://127.0.0.1:1/", "event_types": ["batch.started"]}, "event_types.0"),
        ({"url": "http://127.0.0.1:1/", "signing_secret": "whsec_AAAA"}, "signing_secret"),
        ({"url": "http://127.0.0.1:1/", "signing_secret": "whsec_" + "é" * 40}, "signing_secret"),
    ],
)
def test_a_webhook_that_could_not_work_is_refused(client, fields, param):
    refused = client.post(ROUTE, json=fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert client.get(ROUTE).json()["data"] == []


def test_pages_of_webhooks(client, receiver):
    ids = [register(client, receiver.url, name=f"{each}")["id"] for each in range(3)]
    first = client.get(ROUTE, params={"limit": 2}).json()
    assert ([each["id"] for each in first["data"]], first["has_more"]) == (ids[:0:-1], True)
    rest = client.get(ROUTE, params={"after": first["last_id"]}).json()
    assert ([each["name"] for each in rest["data"]], rest["has_more"]) == (["0"], False)
    for each in ids:
        assert client.delete(f"{ROUTE}/{each}").json()["object"] == "webhook_endpoint.deleted"
    assert client.delete(f"{ROUTE}/{ids[0]}").status_code == 404


def test_a_private_address_is_refused_where_its_network_is_not_named(tmp_path):
    with Receiver() as receiver:
        allowed = {"webhooks__allow": "127.0.0.1", "webhooks__ports": str(receiver.port)}
        with asking("pixels", state_dir=tmp_path, **allowed) as (_, client):
            webhook = register(client, receiver.url)
            refused = client.post(f"{ROUTE}/{webhook['id']}/test")
            assert refused.status_code == 422
            assert "not one that webhooks may be at" in refused.json()["error"]["message"]
            run_batch(client)
            last = lambda: client.get(f"{ROUTE}/{webhook['id']}").json()["last_delivery"]  # noqa: E731
            until(last, 10)
            assert (last()["status"], last()["status_code"]) == ("waiting", None)
        assert receiver.messages == []


def test_without_allowed_hosts_or_a_state_directory_webhooks_are_off(tmp_path):
    for settings, name in (
        ({"state_dir": tmp_path}, "MLCD_WEBHOOKS__ALLOW"),
        (allowing(443), "--state"),
    ):
        with asking("pixels", **settings) as (_, client):
            refused = client.post(ROUTE, json={"url": "https://127.0.0.1/"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
            assert name in refused.json()["error"]["message"]
            assert not (tmp_path / "files").exists()


def test_a_killed_server_loses_no_event_and_two_processes_send_none_twice(tmp_path):
    port, model = free_port(), "fake:latency_ms=5"
    settings = {"engine": "fake", "state_dir": tmp_path, "processes": 2, **allowing(port)}
    server = Server(model, output=subprocess.DEVNULL, **settings)
    with httpx.Client(base_url=server.url, timeout=30) as client:
        server.wait_ready()
        webhook = register(client, f"http://127.0.0.1:{port}/", signing_secret=SECRET)
        assert webhook["signing_secret"] == SECRET
        content = to_jsonl(request_lines(2, model=model))
        batches = [wait_ended(client, begin(client, content))["id"] for _ in range(3)]
        processes = [*children(server.process.pid), server.process.pid]
        for each in processes:
            os.kill(each, signal.SIGKILL)
        server.process.wait()
        until(lambda: not any(map(exists, processes)), 10)
        with Receiver(port) as receiver:  # it was down until here
            server.start_again()
            server.wait_ready()
            batches.append(wait_ended(client, begin(client, content))["id"])
            until(lambda: {event["data"]["id"] for event in receiver.events} == {*batches}, 60)
            time.sleep(2)
            assert Counter(event["data"]["id"] for event in receiver.events) == Counter(batches)
            assert all(is_signed(message, SECRET) for message in receiver.messages)
            name = 'mlcd_webhook_deliveries_total{result="delivered"}'
            until(lambda: server.metric(name) == 4, 5)
    server.stop()


def test_each_key_has_webhooks_of_its_own(tmp_path):
    keys = tmp_path / "keys.json"
    now, scopes = datetime.now(UTC), ("jobs", "embed")
    ann, ann_token = create_key(keys, "ann", now=now, scopes=scopes)
    _, bob_token = create_key(keys, "bob", now=now, scopes=scopes)
    ann_headers, bob_headers = ({"X-API-Key": token} for token in (ann_token, bob_token))
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(Receiver())
        settings = {"state_dir": tmp_path / "state", "auth__keys_file": keys}
        _, client = stack.enter_context(asking("pixels", **settings, **allowing(receiver.port)))
        client.headers.update(ann_headers)
        webhook = register(client, receiver.url)
        url = f"{ROUTE}/{webhook['id']}"
        assert client.get(ROUTE, headers=bob_headers).json()["data"] == []
        for call in (
            lambda: client.get(url, headers=bob_headers),
            lambda: client.post(url, json={"name": "bob's"}, headers=bob_headers),
            lambda: client.post(f"{url}/rotate_secret", headers=bob_headers),
            lambda: client.post(f"{url}/test", headers=bob_headers),
            lambda: client.delete(url, headers=bob_headers),
        ):
            assert call().status_code == 404
        content = to_jsonl(request_lines(2))
        batch_of_bob = begin(client, content, headers=bob_headers)
        batch_of_ann = begin(client, content)
        wait_ended(client, batch_of_bob, headers=bob_headers)
        until(lambda: receiver.messages, 10)
        assert [event["data"]["id"] for event in receiver.events] == [batch_of_ann]
        receiver.answers = [500]
        wait_ended(client, begin(client, content))
        until(lambda: len(receiver.messages) == 2, 10)
        revoke_key(keys, ann.id, now=datetime.now(UTC))
        time.sleep(8)  # the next attempt comes after 5 s
        assert len(receiver.messages) == 2


def test_the_ends_of_jobs_are_told_each_once_and_a_retry_anew(receiver, tmp_path):
    receiver.messages.clear()
    images, state = tmp_path / "images", tmp_path / "state"
    write_digits(images, 2)
    settings = {"state_dir": state, "jobs__roots": tmp_path, **allowing(receiver.port)}
    queue = open_queue(read_settings({"model": "hog", "state_dir": str(state)}))
    server = Server("pixels", output=subprocess.DEVNULL, **settings).wait_ready()
    with contextlib.closing(queue), httpx.Client(base_url=server.url) as client:

        def submit(name):
            job = {"kind": "embed", "input": str(images), "output": str(tmp_path / name)}
            return client.post("/v1/jobs", json=job).json()["id"]

        def claim():
            return queue.claim("hand", [fingerprint], lease_s=60)

        fingerprint = client.get("/v1/info").json()["fingerprint"]
        client.delete(f"/v1/jobs/{submit('before')}")
        time.sleep(0.01)
        register(client, receiver.url)
        canceled, ended = submit("a"), submit("b")
        client.delete(f"/v1/jobs/{canceled}")
        queue.fail(claim(), JobProblem("by-hand", "by a test"), fatal=True)
        until(lambda: len(receiver.messages) == 2, 20)
        client.post(f"/v1/jobs/{ended}/retry")
        queue.finish_plan(claim(), [2])
        while (work := claim()) is not None:
            queue.complete(work)
        until(lambda: len(receiver.messages) == 3, 20)
        server.process.kill()
        server.process.wait()
        server.start_again()
        server.wait_ready()
        time.sleep(3)
        assert Counter((event["type"], event["data"]["id"]) for event in receiver.events) == {
            ("job.canceled", canceled): 1,
            ("job.failed", ended): 1,
            ("job.succeeded", ended): 1,
        }
        assert len({event["id"] for event in receiver.events}) == 3
    server.stop()
