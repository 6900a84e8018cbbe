"""Batches, jobs on uploads and their webhooks, while server, worker and Redis are killed at random
moments: nothing is lost, nothing is there twice.
"""

import base64
import contextlib
import io
import json
import os
import random
import signal
import time
import zipfile

import httpx
import pytest

from tests.conftest import start_mlcd, write_digits
from tests.integration.running import Server, until
from tests.integration.test_batches import request_lines, to_jsonl
from tests.integration.test_webhooks import Receiver, allowing, is_signed
from tests.unit.service.cached import redis_server

NUM_KILLS = 20
NUM_LINES = 60
PASSING = (httpx.TransportError, httpx.TimeoutException)


class Stack:
    """A server, a worker and a Redis, of which each can be killed."""

    def __init__(self, model, folder, redis, receiver):
        self.redis = redis
        self.settings = {
            "state_dir": folder / "state",
            "redis_url": self.redis.url,
            "jobs__roots": folder,
            "jobs__shard_images": 8,
            "jobs__lease_s": 2,
            **allowing(receiver.port),
        }
        self.log = (folder / "log.txt").open("a")
        self.server = Server(model, output=self.log, **self.settings)
        self.model = model
        self.start_worker()
        self.server.wait_ready()

    def start_worker(self):
        given = {f"MLCD_{name.upper()}": str(value) for name, value in self.settings.items()}
        arguments = ("worker", "--model", self.model)
        environment = {**os.environ, **given}
        self.worker = start_mlcd(*arguments, env=environment, stdout=self.log)

    def kill(self, name):
        """Kills a process, and starts it again."""
        if name == "server":
            _kill(self.server.process)
            self.server.start_again()
        elif name == "worker":
            _kill(self.worker)
            self.start_worker()
        else:
            self.redis.stop()
            time.sleep(0.2)
            self.redis.start()

    def close(self):
        for process in (self.worker, self.server.process):
            _kill(process)
        self.log.close()


def _kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def persist(call, *arguments, **options):
    """Returns the answer of a call that is repeated until the server gives it."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(*PASSING):
            answer = call(*arguments, **options)
            if answer.status_code not in (429, 502, 503, 504):
                assert answer.is_success, answer.text
                return answer
        time.sleep(0.2)
    raise AssertionError("the server does not come back")


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.timeout(900)
def test_twenty_kills_lose_nothing_and_repeat_nothing(journey, tmp_path):
    rng = random.Random(54)
    images = write_digits(tmp_path / "images", 60)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path in sorted(images.rglob("*.png")):
            archive.write(path, path.name)
    durable = ("--appendonly", "yes", "--appendfsync", "always")
    with Receiver() as receiver, redis_server(tmp_path, *durable) as redis:
        stack = Stack(journey / "model", tmp_path, redis, receiver)
        try:
            with httpx.Client(base_url=stack.server.url, timeout=20) as client:
                model = client.get("/v1/info").json()["model"]
                lines = request_lines(NUM_LINES, model=model)
                ids, webhook = _play(stack, client, receiver, rng, lines, packed.getvalue())
                _check(client, ids, [lines, _lines_of(packed, model)], receiver, webhook)
        finally:
            stack.close()


def _play(stack, client, receiver, rng, lines, packed):
    """Submits batches and jobs between the kills; returns their ids and the webhook.

    In turn, a batch is of requests and of an archive, and a job embeds and makes a collection.
    """
    webhook = persist(
        client.post, "/v1/webhook_endpoints", json={"name": "ends", "url": receiver.url}
    ).json()
    batch_ids, job_ids = [], []
    for number in range(NUM_KILLS):
        if number % 4 == 0:
            of_archive = len(batch_ids) % 2 == 1
            content = ("in.zip", packed) if of_archive else ("in.jsonl", to_jsonl(lines))
            batch_ids.append(_begin_batch(client, content, "images" if of_archive else "batch"))
            job_ids.append(
                _begin_job(
                    client,
                    packed,
                    f"job-{number}",
                    **(
                        {"kind": "index", "output": f"digits-{number}"}
                        if of_archive
                        else {"kind": "embed", "results": ["jsonl"]}
                    ),
                )
            )
        time.sleep(rng.uniform(0.1, 2.5))
        stack.kill(rng.choice(["server", "worker", "redis"]))
    return (batch_ids, job_ids), webhook


def _lines_of(packed, model):
    """Returns the requests that the images of an archive stand for."""
    with zipfile.ZipFile(packed) as archive:
        uris = {
            name: "data:image/png;base64," + base64.b64encode(archive.read(name)).decode()
            for name in sorted(archive.namelist())
        }
    return [
        {"custom_id": name, "body": {"model": model, "input": [uri]}} for name, uri in uris.items()
    ]


def _begin_batch(client, content, purpose):
    upload = persist(client.post, "/v1/files", files={"file": content}, data={"purpose": purpose})
    body = {
        "input_file_id": upload.json()["id"],
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
    }
    return persist(client.post, "/v1/batches", json=body).json()["id"]


def _begin_job(client, packed, key, **options):
    file = {"file": ("digits.zip", packed)}
    upload = persist(client.post, "/v1/files", files=file, data={"purpose": "images"})
    body = {"input": {"file": upload.json()["id"]}, **options}
    headers = {"Idempotency-Key": key}
    return persist(client.post, "/v1/jobs", json=body, headers=headers).json()["id"]


def _check(client, ids, lines_of_turns, receiver, webhook):
    batch_ids, job_ids = ids

    def all_ended():
        batches = [persist(client.get, f"/v1/batches/{id_}").json() for id_ in batch_ids]
        jobs = [persist(client.get, f"/v1/jobs/{id_}").json() for id_ in job_ids]
        states = [batch["status"] for batch in batches] + [job["state"] for job in jobs]
        assert not {*states} & {"failed", "expired", "cancelled", "canceled"}, (batches, jobs)
        return {*states} == {"completed", "succeeded"}

    until(all_ended, 240)
    for turn, lines in enumerate(lines_of_turns):
        expected = [
            persist(client.post, "/v1/embeddings", json=line["body"]).content for line in lines
        ]
        for batch_id in batch_ids[turn::2]:
            output = persist(client.get, f"/v1/batches/{batch_id}").json()["output_file_id"]
            written = client.get(f"/v1/files/{output}/content").content.splitlines()
            for line, row, answer in zip(lines, written, expected, strict=True):
                assert json.loads(row)["custom_id"] == line["custom_id"]
                assert b'"body":' + answer + b"}" in row
    contents = []
    for job_id in job_ids:
        job = persist(client.get, f"/v1/jobs/{job_id}").json()
        assert (job["progress"]["done"], job["progress"]["failed_items"]) == (60, 0)
        if job["kind"] == "index":
            assert client.get(f"/v1/collections/{job['output']}").json()["items"] == 60
        else:
            contents.append(client.get(f"/v1/files/{job['results']['jsonl']}/content").content)
    assert len({*contents}) == 1
    assert len({json.loads(line)["key"] for line in contents[0].splitlines()}) == 60

    wanted = {*batch_ids, *job_ids}
    until(lambda: {event["data"]["id"] for event in receiver.events} >= wanted, 120)
    event_ids = {}
    for message, event in zip(receiver.messages, receiver.events, strict=True):
        assert is_signed(message, webhook["signing_secret"])
        assert message[0]["webhook-id"] == event["id"]
        event_ids.setdefault(event["data"]["id"], set()).add(event["id"])
    assert {*event_ids} == wanted
    assert all(len(ids) == 1 for ids in event_ids.values())  # one id for each end
