"""`JobsClient` against a server that answers as a script says."""

import json

import pytest

from mlcd.client.problems import Refused
from service.jobs.client import JobsClient
from tests.unit.client.scripted import Reply, scripted

RUNNING = {"id": "1", "state": "running", "ended": None}
ENDED = {"id": "1", "state": "canceled", "ended": "2026-11-01T00:00:00Z"}
NO_MORE = Reply(204, b"")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("service.jobs.client.JOBS_WATCH_PAUSE_S", 0.01)


def stream(job, number):
    return Reply(body=f"event: job\nid: {number}\ndata: {json.dumps(job)}\n\n".encode())


def shown(job):
    return Reply(body=json.dumps(job).encode())


def watched(*replies):
    """What was told, and the path and Last-Event-ID of each question."""
    with scripted(*replies) as (url, asked), JobsClient(url, None) as client:
        told = list(client.watch("1"))
    return told, [
        (each.path.removeprefix("/v1/jobs/1"), each.headers.get("last-event-id")) for each in asked
    ]


def test_a_watch_ends_where_the_server_has_no_more_of_a_job_that_has_ended():
    told, asked = watched(stream(RUNNING, 7), NO_MORE, shown(ENDED))
    assert told == [RUNNING, ENDED]
    assert asked == [("/events", None), ("/events", "7"), ("", None)]


def test_a_watch_goes_on_with_a_job_that_was_retried_in_between():
    told, asked = watched(stream(RUNNING, 7), NO_MORE, shown(RUNNING), stream(ENDED, 9))
    assert told == [RUNNING, RUNNING, ENDED]
    assert asked[-1] == ("/events", None)


def test_a_watch_tells_why_a_job_cannot_be_read():
    damaged = Reply(
        500,
        json.dumps(
            {"type": "urn:mlcd:problem:job-damaged", "detail": "no job: DELETE it"}
        ).encode(),
    )
    with pytest.raises(Refused, match="no job: DELETE it"):
        watched(stream(RUNNING, 7), damaged)
