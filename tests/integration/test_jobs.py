"""Batch jobs over REST and by `mlcd jobs`, on a real server; the worker is played by hand, on the
server's queue.
"""

import contextlib
import json
import os
import re
import sqlite3
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import httpx
import pytest

from mlcd.client import Client, RefusedConflict, RefusedInput, RefusedNotFound
from mlcd.encoders.pixels import PixelsEncoder
from mlcd.images.sources import open_source
from mlcd.pipelines.embed import embed
from mlcd.progress import Reporter
from mlcd.service.jobs.job import JobProblem, JobState
from mlcd.service.jobs.service import open_queue
from mlcd.service.keys.file import create_key
from mlcd.service.settings import read_settings
from tests.conftest import call_mlcd, start_mlcd, write_digits
from tests.integration.running import asking, serving, until
from tests.integration.test_client import PAGE
from tests.integration.test_schema import explore
from tests.unit.service.cached import redis_server

LEASE_S = 600.0


class Place:
    """A root with images in it, a server that takes jobs there, and its queue as workers see it."""

    def __init__(self, server, folder, store, token):
        self.server, self.folder, self.store = server, folder, store
        self.headers = {"Authorization": f"Bearer {token}"}
        self.client = httpx.Client(base_url=server.url, headers=self.headers, timeout=30)
        self.token, self.number = token, 0
        self.models = [self.client.get("/v1/info").json()["fingerprint"]]

    def asked(self, **changes):
        self.number += 1
        output = self.folder / f"out-{self.number}"
        return {
            "kind": "label",
            "input": str(self.folder / "images"),
            "output": str(output),
        } | changes

    def submit(self, key=None, **changes):
        headers = {} if key is None else {"Idempotency-Key": key}
        return self.client.post("/v1/jobs", json=self.asked(**changes), headers=headers)

    def submitted(self, **changes):
        answer = self.submit(**changes)
        assert answer.status_code == 202, answer.text
        return answer.json()["id"]

    def show(self, job_id):
        return self.client.get(f"/v1/jobs/{job_id}").json()

    def claim(self):
        return self.store.claim("hand", self.models, lease_s=LEASE_S)

    def clear(self):
        """Nothing of earlier tests is left to claim."""
        while (work := self.claim()) is not None:
            self.store.fail(work, JobProblem("cleared", "by a test"), fatal=True)

    def work_off(self, sizes=(10, 10), pause_s=0.0):
        """Do all that can be claimed."""
        while (work := self.claim()) is not None:
            time.sleep(pause_s)
            if work.stage == "plan":
                self.store.finish_plan(work, sizes)
            else:
                self.store.complete(work)


@pytest.fixture(scope="module")
def place(journey, new_state, tmp_path_factory):
    folder = tmp_path_factory.mktemp("root")
    write_digits(folder / "images", 20)
    state, keys = new_state(), tmp_path_factory.mktemp("keys") / "keys.json"
    tokens = [create_key(keys, "n", scopes=["jobs"], now=datetime.now(UTC))[1] for _ in range(2)]
    given = {"state_dir": state, "jobs__roots": folder, "auth__keys_file": keys}
    store = open_queue(read_settings({"model": "hog", "state_dir": str(state)}))
    with serving(journey / "model", **given) as server, contextlib.closing(store):
        place = Place(server, folder, store, tokens[0])
        store.heartbeat("hand", place.models[0], lease_s=LEASE_S)
        place.other = {"Authorization": f"Bearer {tokens[1]}"}
        with contextlib.closing(place.client):
            yield place


@pytest.fixture(autouse=True)
def nothing_left(request):
    yield
    if "place" in request.fixturenames:
        request.getfixturevalue("place").clear()


def own_root(tmp_path, **changes):
    """Returns the body of a submission, and the settings of a server that takes it."""
    images = write_digits(tmp_path / "root" / "images", 3)
    asked = {"kind": "embed", "input": str(images), "output": str(tmp_path / "root" / "out")}
    return asked, {
        "state_dir": tmp_path / "state", "jobs__roots": tmp_path / "root", **changes
    }  # fmt: skip


def read_events(place, job_id, last=None, limit=None, **options):
    """(id, job) of each event until the stream ends, or so many."""
    headers = {} if last is None else {"Last-Event-ID": str(last)}
    found, number = [], None
    with place.client.stream(
        "GET", f"/v1/jobs/{job_id}/events", headers=headers, **options
    ) as answer:
        expected = (200, "text/event-stream; charset=utf-8")
        assert (answer.status_code, answer.headers["content-type"]) == expected
        for line in answer.iter_lines():
            if line.startswith("data: "):
                job = json.loads(line[6:])
            elif line.startswith("id: "):
                number = int(line[4:])
            elif not line and number is not None:
                found.append((number, job))
                number = None
                if len(found) == limit:
                    break
    return found


def test_a_job_is_accepted_for_the_model_and_centers_that_are_served(place):
    answer = place.submit(top=3, threshold=0.25, embeddings=True)
    job = answer.json()
    assert answer.status_code == 202
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    shown = [job[name] for name in ("state", "top", "threshold", "embeddings")]
    assert shown == ["queued", 3, 0.25, True]
    assert (job["fingerprint"], job["centers"]) == (
        place.models[0], answer.headers["x-mlcd-centers"]
    )  # fmt: skip
    assert place.client.get(answer.headers["location"]).json() == job
    assert place.client.get("/v1/jobs", params={"state": "queued"}).json()["jobs"] == [job]
    spec = place.claim().spec
    assert (spec.kind, spec.input, spec.output) == ("label", job["input"], job["output"])
    assert (spec.top, spec.threshold, spec.embeddings) == (3, 0.25, True)
    assert (spec.fingerprint, spec.centers) == (job["fingerprint"], job["centers"])


def test_a_job_of_embeddings_has_no_labels(place):
    job = place.submit(kind="embed").json()
    assert [job[name] for name in ("top", "threshold", "embeddings", "centers")] == [None] * 4
    for field, value in (("top", 3), ("threshold", 0.5), ("embeddings", True)):
        refused = place.submit(kind="index", **{field: value})
        assert (refused.status_code, refused.json()["param"]) == (400, field)


def test_a_job_that_curates_has_the_options_of_the_command(place):
    embeddings = place.folder / "embeddings"
    embed(
        open_source(str(place.folder / "images")), PixelsEncoder(), embeddings, Reporter("silent")
    )
    asked = {"kind": "curate", "input": str(embeddings)}
    answer = place.submit(**asked, duplicates=0.9, balance=20, issues=["dark"])
    assert answer.status_code == 202, answer.text
    job = answer.json()
    shown = [job[name] for name in ("duplicates", "balance", "issues", "keep", "top", "report")]
    assert shown == [0.9, 20, ["dark"], "first", None, False]
    assert job["centers"] is not None
    assert place.claim().spec.issues == ("dark",)
    no_samples = place.submit(**asked, duplicates=0.9)
    assert no_samples.json()["centers"] is None
    for wrong, param in (
        ({"top": 3}, "top"),
        ({"report": True}, "duplicates"),
        ({"kind": "label", "input": str(place.folder / "images"), "balance": 3}, "balance"),
    ):
        refused = place.submit(**asked | wrong)
        assert (refused.status_code, refused.json()["param"]) == (400, param)
    images = place.submit(kind="curate", input=str(place.folder / "images"), duplicates=0.9)
    assert (images.status_code, "finished embeddings artifact" in images.text) == (422, True)
    (embeddings / "part-00000.npy").rename(place.folder.parent / "elsewhere.npy")
    (embeddings / "part-00000.npy").symlink_to(place.folder.parent / "elsewhere.npy")
    outside = place.submit(**asked, duplicates=0.9)
    assert outside.status_code == 403


def test_places_that_jobs_may_not_use_are_refused(place):
    for field in ("input", "output"):
        answer = place.submit(**{field: "/etc"})
        assert (answer.status_code, answer.json()["param"]) == (403, field)
    assert place.submit(input="images").status_code == 400
    assert place.submit(input=str(place.folder / "none")).status_code == 422
    assert place.submit(output=str(place.folder / "images")).status_code == 409
    assert place.claim() is None


def test_a_request_that_is_no_job_is_refused(place):
    for changes in ({"kind": "train"}, {"top": 0}, {"threshold": 2}, {"more": 1}):
        assert place.submit(**changes).status_code == 400, changes
    assert place.submit(top=1001).status_code == 413
    for body in ({}, {"kind": "label"}):
        assert place.client.post("/v1/jobs", json=body).status_code == 400
    text = {"content": b"x", "headers": {"Content-Type": "text/plain"}}
    assert place.client.post("/v1/jobs", **text).status_code == 415


def test_one_idempotency_key_makes_one_job_for_each_client(place):
    asked = place.asked()

    def post(body=asked, **headers):
        return place.client.post("/v1/jobs", json=body, headers={"Idempotency-Key": "k", **headers})

    first = post()
    assert (first.status_code, post().status_code) == (202, 200)
    assert post().json() == first.json()
    assert post(asked | {"top": 7}).status_code == 409
    other = place.client.post(
        "/v1/jobs", json=place.asked(), headers={"Idempotency-Key": "k", **place.other}
    )
    assert (other.status_code, other.json()["id"] != first.json()["id"]) == (202, True)
    place.work_off()
    Path(asked["output"]).mkdir()  # as a worker does
    again = post()
    assert (again.status_code, again.json()["state"]) == (200, "succeeded")
    assert post(**{"Idempotency-Key": "k" * 256}).status_code == 400


def test_jobs_are_listed_page_by_page(place):
    ids = [place.submitted() for _ in range(5)]
    seen, cursor = [], None
    while True:
        params = {"limit": 2, "state": "queued"} | ({} if cursor is None else {"cursor": cursor})
        page = place.client.get("/v1/jobs", params=params).json()
        seen += [job["id"] for job in page["jobs"]]
        if (cursor := page["cursor"]) is None:
            break
    assert seen == ids[::-1]
    for params in ({"limit": 0}, {"limit": 201}, {"state": "x"}):
        assert place.client.get("/v1/jobs", params=params).status_code == 400
    assert place.client.get("/v1/jobs", params={"cursor": "x"}).status_code == 422


def test_a_stream_goes_on_after_the_last_event_that_was_seen(place):
    job_id = place.submitted()
    place.work_off()
    everything = read_events(place, job_id, last=0)
    assert len(everything) > 4
    assert read_events(place, job_id, last=2) == everything[2:]
    assert read_events(place, job_id) == everything[-1:]  # a new watcher needs no history
    last = everything[-1][0]
    ended = place.client.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": str(last)})
    assert (ended.status_code, ended.content) == (204, b"")
    for bad in ("x", "-1", str(2**60)):
        refused = place.client.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": bad})
        assert refused.status_code == 400


def test_a_job_that_cannot_be_read_says_so_and_how_to_be_rid_of_it(place):
    job_id = place.submitted()
    with contextlib.closing(sqlite3.connect(place.store._database._path)) as database:
        database.execute("UPDATE jobs SET record = '{}' WHERE id = ?", (job_id,))
        database.commit()
    for method, path in (("GET", ""), ("GET", "/failures"), ("POST", "/retry"), ("GET", "/events")):
        headers = {"Last-Event-ID": "99"} if path == "/events" else {}
        answer = place.client.request(method, f"/v1/jobs/{job_id}{path}", headers=headers)
        assert answer.status_code == 500, path
        assert answer.json()["type"] == "urn:mlcd:problem:job-damaged"
    told = command(place, "show", job_id)
    assert (told.returncode, told.stdout) == (2, "")
    assert "DELETE of the job removes it" in told.stderr
    assert place.client.delete(f"/v1/jobs/{job_id}").status_code == 404
    assert place.client.get(f"/v1/jobs/{job_id}").status_code == 404


def test_the_queue_is_in_the_metrics(place):
    job_id, server = place.submitted(), place.server
    place.store.heartbeat("hand", place.models[0], lease_s=LEASE_S)

    def told():
        jobs = {
            state: server.metric(f'mlcd_jobs{{state="{state}"}}') for state in get_args(JobState)
        }
        return jobs, server.metric("mlcd_job_depth"), server.metric("mlcd_job_workers")

    def counted():
        stats = place.store.stats()
        return {state: stats.jobs.get(state, 0) for state in get_args(JobState)}, stats.depth, 1

    assert counted()[0]["queued"] > 0
    until(lambda: told() == counted(), 10)
    assert server.metric("mlcd_job_oldest_wait_seconds") > 0
    place.client.delete(f"/v1/jobs/{job_id}")
    until(lambda: told() == counted(), 10)


def command(place, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLCD_API_KEY", place.token)
        return call_mlcd("jobs", "--url", place.server.url, *arguments)


def test_the_command_submits_lists_shows_cancels_and_retries(place, monkeypatch):
    monkeypatch.chdir(place.folder)
    submit = ("submit", "images", "cli", "--top", "2", "--key", "once")
    made = command(place, *submit)
    job_id = made.stdout.strip()
    assert (made.returncode, made.stderr) == (0, "")
    job = place.show(job_id)
    paths = [str(place.folder / name) for name in ("images", "cli")]
    assert [job["top"], job["input"], job["output"]] == [2, *paths]
    again = command(place, *submit, "--json")
    assert json.loads(again.stdout) == job
    shown = json.loads(command(place, "show", job_id).stdout)
    assert shown == {**job, "failures": [], "more_failures": 0}
    lines = command(place, "list", "--state", "queued").stdout.splitlines()
    assert lines[1].split()[:3] == [job_id, "label", "queued"]
    assert job in map(json.loads, command(place, "list", "--json").stdout.splitlines())
    assert command(place, "cancel", job_id).stdout == f"{job_id} is canceled\n"
    assert command(place, "retry", job_id).stdout == f"{job_id} is queued again\n"


def broken_job(place, num_shards, monkeypatch):
    """A job whose shards have failed, all but the last."""
    monkeypatch.setattr("mlcd.service.jobs.transitions.FIRST_PAUSE_S", 0.0)
    job_id = place.submitted()
    place.store.finish_plan(place.claim(), [100] * num_shards, damaged_files=2)
    while (work := place.claim()) is not None:
        if work.shard == num_shards - 1:
            place.store.complete(work)
        else:
            place.store.fail(
                work, JobProblem("undecodable", f"shard {work.shard} is broken", "mend it")
            )
    return job_id


def test_failed_shards_are_listed_page_by_page_with_reasons(place, monkeypatch):
    job_id = broken_job(place, 8, monkeypatch)
    job = place.show(job_id)
    progress = [job["progress"][name] for name in ("shards_failed", "damaged_files")]
    assert [job["state"], *progress] == ["failed", 7, 2]
    address = f"/v1/jobs/{job_id}/failures"
    everything = place.client.get(address).json()
    assert everything["cursor"] is None
    assert everything["failures"][2] == {
        "shard": 2,
        "images": 100,
        "problem": {"code": "undecodable", "message": "shard 2 is broken", "remedy": "mend it"},
    }
    seen, params = [], {"limit": 3}
    while params.get("cursor", 0) is not None:
        page = place.client.get(address, params=params).json()
        assert len(page["failures"]) <= 3
        seen += page["failures"]
        params["cursor"] = page["cursor"]
    assert seen == everything["failures"]
    assert [failure["shard"] for failure in seen] == list(range(7))
    for name, value in (("limit", 0), ("limit", 201), ("cursor", "x"), ("cursor", 2**60)):
        assert place.client.get(address, params={name: value}).status_code == 400
    shown = json.loads(command(place, "show", job_id).stdout)
    assert (shown["failures"], shown["more_failures"]) == (seen[:5], 2)
    lines = command(place, "failures", job_id).stdout.splitlines()
    assert (len(lines), lines[6]) == (7, "shard 6 (100 images): shard 6 is broken: mend it")
    lines = command(place, "failures", job_id, "--json").stdout.splitlines()
    assert [*map(json.loads, lines)] == seen
    told = f"damaged files: 2, shards left aside: 7 (mlcd jobs failures {job_id})"
    assert told in command(place, "watch", job_id).stdout
    place.client.post(f"/v1/jobs/{job_id}/retry")
    assert place.client.get(address).json() == {"failures": [], "cursor": None}


@pytest.mark.slow
def test_jobs_that_ended_long_ago_are_forgotten_while_the_server_runs(tmp_path):
    """And what they have made stays."""
    asked, given = own_root(tmp_path, jobs__keep_days=1 / 86400)
    with asking("pixels", **given) as (_, client):
        header = {"Idempotency-Key": "k"}
        kept = client.post("/v1/jobs", json=asked, headers=header).json()["id"]
        Path(asked["output"]).mkdir()  # as a worker does
        assert client.delete(f"/v1/jobs/{kept}").json()["state"] == "canceled"
        until(lambda: client.get(f"/v1/jobs/{kept}").status_code == 404, 20)
        assert client.get("/v1/jobs").json()["jobs"] == []
        assert Path(asked["output"]).is_dir()
        again = client.post(
            "/v1/jobs", json=asked | {"output": f"{tmp_path}/root/2"}, headers=header
        )
        assert (again.status_code, again.json()["id"] != kept) == (202, True)
        time.sleep(7)
        assert client.get(again.headers["location"]).status_code == 200


def test_the_command_watches_to_the_end(place):
    environment = {**os.environ, "MLCD_API_KEY": place.token}
    submit = ("submit", place.folder / "images", place.folder / "watched\u2028here")
    arguments = ("jobs", "--url", place.server.url, *submit, "--watch", "--json")
    process = start_mlcd(*arguments, env=environment)
    until(
        lambda: (work := place.claim()) is not None and not place.store.finish_plan(work, [10, 10]),
        30,
    )
    place.store.complete(place.claim(), failed_items=2)
    time.sleep(1.5)
    place.work_off()
    output, _ = process.communicate(timeout=30)
    lines = [json.loads(line) for line in output.splitlines()]
    assert process.returncode == 0
    assert [line["done"] for line in lines[:-1] if line["stage"] == "label"][-1] == 20
    assert (lines[-1]["state"], lines[-1]["progress"]["failed_items"]) == ("succeeded", 2)
    failed = place.submitted()
    place.store.fail(
        place.claim(), JobProblem("no-space", "the disk is full", "free some"), fatal=True
    )
    told = command(place, "watch", failed)
    assert (told.returncode, told.stderr) == (1, "")
    assert told.stdout.endswith(
        "failed: 0 images, 0 of them without a result; the disk is full: free some\n"
    )


def test_the_command_prints_no_escapes_of_a_terminal(place):
    write_digits(place.folder / "other\x1b[31m\nid", 3)
    job_id = place.submitted(input=str(place.folder / "other\x1b[31m\nid"))
    place.store.fail(place.claim(), JobProblem("x", "broken\x1b[31m\nid"), fatal=True)
    of_job = [(name, job_id) for name in ("show", "watch", "failures")]
    for arguments in (("list",), ("list", "--json"), *of_job):
        told = command(place, *arguments)
        assert "\x1b" not in told.stdout + told.stderr
        assert not any(
            line.startswith("id") and "created" not in line for line in told.stdout.splitlines()
        )
    assert "other\\x1b[31m\\nid" in command(place, "list").stdout
    assert "broken\\x1b[31m\\nid" in command(place, "watch", job_id).stdout


def test_the_command_says_that_no_worker_is_there(place, monkeypatch):
    monkeypatch.setattr("mlcd.service.jobs.transitions.WORKER_START_S", 0.0)
    job_id = place.submitted()
    place.store.heartbeat("hand", place.models[0], lease_s=0.01)
    time.sleep(0.1)
    place.store.note_served()
    environment = {**os.environ, "MLCD_API_KEY": place.token}
    arguments = ("jobs", "--url", place.server.url, "watch", job_id)
    process = start_mlcd(*arguments, env=environment, stderr=subprocess.PIPE)
    assert process.stderr.readline().startswith("mlcd: no worker that lives has the model")
    place.store.heartbeat("hand", place.models[0], lease_s=LEASE_S)
    place.work_off()
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert "succeeded" in output


@pytest.fixture
def jobs(place):
    with Client(place.server.url, api_key=place.token) as client:
        yield client.jobs


def test_the_client_submits_watches_lists_and_retries(place, jobs):
    asked = place.asked()
    job = jobs.submit(asked["input"], asked["output"], kind="embed")
    assert (job.kind, job.state, job.fingerprint) == ("embed", "queued", place.models[0])
    assert (job.ended, job.problem, job.top, job.threshold, job.embeddings) == (None,) * 5
    assert jobs.get(job.id) == job
    changes = jobs.watch(job.id)
    seen = [next(changes)]
    with ThreadPoolExecutor(1) as worker:
        worker.submit(place.work_off, pause_s=0.05)
        seen += changes
    assert [seen[0].state, seen[-1].state] == ["queued", "succeeded"]
    assert seen[-1].progress.done == seen[-1].progress.images == 20
    assert seen[-1].created <= seen[-1].started <= seen[-1].ended
    assert [seen[-1]] == [*jobs.watch(job.id)] == [jobs.get(job.id)]
    for state in ("succeeded", "queued"):
        assert (job.id in [each.id for each in jobs.list(state=state)]) == (state == "succeeded")
    other = place.submitted()
    assert jobs.cancel(other).state == "canceled"
    assert [each.state for each in jobs.watch(other)] == ["canceled"]
    assert jobs.retry(other).state == "queued"
    place.store.fail(place.claim(), JobProblem("broken", "it is", "mend it"), fatal=True)
    assert (jobs.get(other).problem.code, jobs.get(other).problem.remedy) == ("broken", "mend it")
    assert list(jobs.failures(other)) == []  # a fatal failure leaves no shard aside


def test_what_the_client_cannot_have_is_refused(place, jobs):
    asked = place.asked()
    paths = asked["input"], asked["output"]
    for wrong, error, said in (
        (lambda: jobs.get("0" * 20), RefusedNotFound, "unknown job"),
        (lambda: list(jobs.watch("0" * 20)), RefusedNotFound, "unknown job"),
        (lambda: jobs.submit(*paths, kind="embed", top=3), RefusedInput, "label jobs only"),
        (lambda: jobs.submit(*paths, url_column="url"), RefusedConflict, "fetches no images"),
        (lambda: jobs.submit("images", "/out", kind="embed"), RefusedInput, "absolute"),
    ):
        with pytest.raises(error, match=said):
            wrong()


def test_jobs_of_the_page_of_the_client_run(place, capsys):
    block, _of_uploads = re.findall(
        r"^```python\n([^`]*client\.jobs[^`]*)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    asked = place.asked()
    code = block.replace("/data/archive/*.tar", asked["input"])
    code = code.replace("/data/labels", asked["output"]).replace("top=3", 'kind="embed"')
    with Client(place.server.url, api_key=place.token) as client, ThreadPoolExecutor(1) as worker:
        worker.submit(lambda: (time.sleep(0.5), place.work_off()))
        exec(compile(code, str(PAGE), "exec"), names := {"client": client})
    assert names["job"].state == "succeeded"
    assert "20" in capsys.readouterr().out


def test_a_server_without_folders_takes_no_jobs(client):
    asked = {"kind": "embed", "input": "/in", "output": "/out"}
    for answer in (
        *(client.get(f"/v1/jobs{path}") for path in ("", "/x", "/x/events", "/x/failures")),
        client.post("/v1/jobs", json=asked),
        client.post("/v1/jobs/x/retry"),
    ):
        assert answer.status_code == 409
        assert "MLCD_JOBS__ROOTS" in answer.json()["detail"]
    assert "mlcd_jobs{" not in client.get("/metrics").text


def test_streams_end_with_the_deadline_and_with_the_server(tmp_path):
    """Neither a client that listens for ever nor a server that has to end waits for the other."""
    asked, given = own_root(tmp_path, limits__deadline_s=3)
    with serving("pixels", **given) as server:
        job_id = httpx.post(f"{server.url}/v1/jobs", json=asked, timeout=30).json()["id"]
        address, started = f"{server.url}/v1/jobs/{job_id}/events", time.monotonic()
        assert httpx.get(address, timeout=30).text.count("data: ") == 1
        assert 1 < time.monotonic() - started < 6
        with httpx.stream("GET", address, timeout=30) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.terminate()
            assert until_end(lines) < 5
        server.process.communicate(timeout=10)
        assert server.process.returncode == 0


@pytest.mark.slow
def test_a_silent_stream_shows_that_it_lives(place):
    job_id = place.submitted()
    with place.client.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
        started = time.monotonic()
        assert next(line for line in stream.iter_lines() if line.startswith(":"))
        assert 5 < time.monotonic() - started < 20


def until_end(lines):
    started = time.monotonic()
    for _ in lines:
        pass
    return time.monotonic() - started


@pytest.mark.redis
def test_jobs_outlive_redis_and_all_servers_see_them(tmp_path):
    """kill -9 of Redis: requests are refused meanwhile; what was acknowledged is there
    afterwards.
    """
    with redis_server(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as redis:
        asked, given = own_root(tmp_path, redis_url=redis.url, processes=2)
        with asking("pixels", **given) as (server, client):
            bodies = [asked | {"output": f"{tmp_path}/root/{n}"} for n in range(5)]
            ids = [client.post("/v1/jobs", json=body).json()["id"] for body in bodies]
            redis.stop()
            refused = client.get("/v1/jobs")
            assert (refused.status_code, "Redis" in refused.json()["detail"]) == (503, True)
            assert client.get("/health/ready").status_code == 200
            until(lambda: server.metric("mlcd_job_queue_up") == 0, 20)
            redis.start()
            until(lambda: client.get("/v1/jobs").status_code == 200, 10)
            assert [job["id"] for job in client.get("/v1/jobs").json()["jobs"]] == ids[::-1]
            assert client.delete(f"/v1/jobs/{ids[0]}").json()["state"] == "canceled"
            until(lambda: server.metric('mlcd_jobs{state="canceled"}') == 1, 10)
            until(lambda: server.metric("mlcd_job_queue_up") == 2, 10)
            assert server.metric('mlcd_jobs{state="queued"}') == 4


@pytest.mark.slow  # without roots the routes are in test_schema.py
def test_the_document_is_true_of_jobs(place):
    header = f"Authorization: {place.headers['Authorization']}"
    explore(
        place.server.url,
        10,
        "--include-path-regex",
        "^/v1/jobs",
        "--header",
        header,
        without=["use_after_free"],  # DELETE cancels a job, whose record stays
        timeout_s=280,
    )
