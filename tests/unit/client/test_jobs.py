"""`Client.jobs` and `AsyncClient.jobs` against a server that answers as a script says."""

import asyncio
import json

import pytest

from mlcd.client import AnswerInvalid, AsyncClient, Client, Refused, RefusedNotFound
from mlcd.errors import InvalidInput, Unavailable
from mlcd.wire.queued_jobs import Job
from tests.unit.client.scripted import Reply, scripted

PROGRESS = dict.fromkeys(
    ("shards", "images", "stage", "collected", "indexed", "images_per_s", "eta_s")
) | dict.fromkeys(("shards_done", "shards_failed", "done", "failed_items", "damaged_files"), 0)
RUNNING = dict.fromkeys(Job.model_fields) | {
    "id": "1",
    "kind": "embed",
    "state": "running",
    "input": "/in",
    "output": "/out",
    "fingerprint": "f",
    "created": "2026-11-01T00:00:00.25Z",
    "started": "2026-11-01T00:00:01Z",
    "progress": PROGRESS,
}
ENDED = RUNNING | {"state": "canceled", "ended": "2026-11-01T00:00:02Z"}
NO_MORE = Reply(204, b"")
MOMENT_S = 0.01


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("mlcd.client.batch_jobs._PAUSE_S", MOMENT_S)


def stream(job, number, end="\n\n"):
    body = f"retry: 1000\n\n: \n\nevent: job\nid: {number}\ndata: {json.dumps(job)}{end}"
    return Reply(body=body.encode(), headers={"Content-Type": "text/event-stream; charset=utf-8"})


def shown(job):
    return Reply(body=json.dumps(job).encode())


def refusal(status, name, **headers):
    content = {"type": f"urn:mlcd:problem:{name}", "detail": f"it is {name}"}
    return Reply(status, json.dumps(content).encode(), headers)


def sync_watch(url):
    with Client(url, retries=0) as client:
        return list(client.jobs.watch("1"))


def async_watch(url):
    async def watch():
        async with AsyncClient(url, retries=0) as client:
            return [job async for job in client.jobs.watch("1")]

    return asyncio.run(watch())


@pytest.fixture(params=[sync_watch, async_watch])
def watched(request):
    def watch(*replies):
        """The states, and the path and Last-Event-ID of each request."""
        with scripted(*replies) as (url, asked):
            states = [job.state for job in request.param(url)]
        return states, [
            (each.path.removeprefix("/v1/jobs/1"), each.headers.get("last-event-id"))
            for each in asked
        ]

    return watch


def test_a_watch_ends_where_the_server_has_no_more_of_a_job_that_has_ended(watched):
    states, asked = watched(stream(RUNNING, 7), NO_MORE, shown(ENDED))
    assert states == ["running", "canceled"]
    assert asked == [("/events", None), ("/events", "7"), ("", None)]


def test_a_watch_goes_on_with_a_job_that_was_retried_in_between(watched):
    states, asked = watched(stream(RUNNING, 7), NO_MORE, shown(RUNNING), stream(ENDED, 9))
    assert states == ["running", "running", "canceled"]
    assert asked[-1] == ("/events", None)


def test_a_watch_outlives_broken_streams_and_busy_servers(watched):
    cut = stream(RUNNING, 8, end="")
    states, asked = watched(
        stream(RUNNING, 7), Reply(drop=True), refusal(503, "stopping"), cut, stream(ENDED, 9)
    )
    assert states == ["running", "canceled"]
    assert asked == [("/events", None)] + [("/events", "7")] * 4


def test_a_watch_comes_back_no_earlier_than_the_server_says():
    busy = refusal(429, "busy", **{"Retry-After": "1"})
    with scripted(busy, stream(ENDED, 1)) as (url, asked):
        sync_watch(url)
        assert asked[1].at - asked[0].at >= 1


def test_a_watch_gives_up_after_many_streams_in_vain(watched, monkeypatch):
    monkeypatch.setattr("mlcd.client.batch_jobs._MAX_EMPTY_STREAMS", 3)
    with pytest.raises(Unavailable):
        watched(Reply(drop=True))


def test_a_watch_tells_why_a_job_cannot_be_read(watched):
    with pytest.raises(Refused, match="it is job-damaged"):
        watched(stream(RUNNING, 7), refusal(500, "job-damaged"))


def test_a_page_in_place_of_a_stream_is_not_this_api(watched):
    with pytest.raises(AnswerInvalid):
        watched(Reply(body=b"<html>", headers={"Content-Type": "text/html"}))


def test_a_watch_may_be_left():
    with scripted(stream(RUNNING, 7)) as (url, _), Client(url) as client:
        changes = client.jobs.watch("1")
        assert next(changes).state == "running"
        changes.close()
        left = client.jobs.watch("1")
        next(left)
    left.close()  # after the client


def test_a_list_is_asked_for_page_by_page():
    pages = [{"jobs": [RUNNING, RUNNING], "cursor": "c 1"}, {"jobs": [ENDED], "cursor": None}]
    with scripted(*map(shown, pages)) as (url, asked), Client(url) as client:
        jobs = client.jobs.list(state="canceled")
        assert [next(jobs).state, next(jobs).state] == ["running", "running"]
        assert len(asked) == 1
        assert [job.state for job in jobs] == ["canceled"]
    expected = ["/v1/jobs?limit=200&state=canceled", "/v1/jobs?limit=200&state=canceled&cursor=c+1"]
    assert [each.path for each in asked] == expected


def test_failures_have_their_reasons():
    problem = {"code": "undecodable", "message": "broken", "remedy": None}
    page = {"failures": [{"shard": 3, "images": 5, "problem": problem}], "cursor": None}
    with scripted(shown(page)) as (url, _), Client(url) as client:
        (failed,) = client.jobs.failures("1")
    assert (failed.shard, failed.images, failed.problem.code) == (3, 5, "undecodable")


def test_times_are_moments():
    with scripted(shown(ENDED)) as (url, _), Client(url) as client:
        job = client.jobs.get("1")
    assert (job.started - job.created).total_seconds() == 0.75
    assert job.ended.utcoffset().total_seconds() == 0


def test_a_submission_that_is_repeated_is_the_same_one():
    with scripted(Reply(drop=True), shown(RUNNING)) as (url, asked), Client(url) as client:
        client.jobs.submit("/in", "/out", kind="embed")
    first, second = asked
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert (
        json.loads(first.body)
        == json.loads(second.body)
        == {"kind": "embed", "input": "/in", "output": "/out"}
    )


def test_options_and_the_key_are_sent():
    with scripted(shown(RUNNING)) as (url, asked), Client(url) as client:
        client.jobs.submit("/in", "/out", top=3, threshold=0.0, embeddings=False, key="mine")
    assert asked[0].headers["idempotency-key"] == "mine"
    assert json.loads(asked[0].body) == {
        "kind": "label",
        "input": "/in",
        "output": "/out",
        "top": 3,
        "threshold": 0.0,
        "embeddings": False,
    }


@pytest.mark.parametrize("key", ["", "a b", "é", "x" * 256])
def test_a_key_that_no_header_can_hold_is_refused(key):
    with (
        Client("http://127.0.0.1:9") as client,
        pytest.raises(InvalidInput, match="idempotency key"),
    ):
        client.jobs.submit("/in", "/out", key=key)


def test_no_name_of_a_job_leads_elsewhere():
    with scripted(refusal(404, "not-found")) as (url, asked), Client(url) as client:
        for name in ("../info", "a/b?c"):
            with pytest.raises(RefusedNotFound):
                client.jobs.get(name)
    assert [each.path for each in asked] == ["/v1/jobs/%2E%2E%2Finfo", "/v1/jobs/a%2Fb%3Fc"]
