"""Batch jobs by the Python client, on a real server; the worker is played by hand, on the server's
queue.
"""

import asyncio
import contextlib
import re
import threading
import time

import pytest

from mlcd.client import AsyncClient, Client, RefusedConflict, RefusedInput, RefusedNotFound
from service.jobs.job import JobProblem
from service.jobs.service import open_queue
from service.settings import read_settings
from tests.conftest import write_digits
from tests.integration.running import serving
from tests.integration.test_client import PAGE

LEASE_S = 600.0


class Place:
    """A root with images, a server that takes jobs there, a client of it, and the queue as workers
    see it.
    """

    def __init__(self, url, folder, queue, client):
        self.url, self.folder, self.queue, self.client, self.jobs = (
            url,
            folder,
            queue,
            client,
            client.jobs,
        )
        self.models = [client.info().fingerprint]
        self.number = 0

    def paths(self):
        self.number += 1
        return str(self.folder / "images"), str(self.folder / f"out-{self.number}")

    def submit(self, **options):
        return self.jobs.submit(*self.paths(), kind="embed", **options)

    def claim(self):
        return self.queue.claim("hand", self.models, lease_s=LEASE_S)

    def work_off(self, fail=()):
        """Does all that can be claimed; these shards fail."""
        while (work := self.claim()) is not None:
            time.sleep(0.05)
            if work.stage == "plan":
                self.queue.finish_plan(work, [10, 10])
            elif work.shard in fail:
                self.queue.fail(
                    work,
                    JobProblem("broken", f"shard {work.shard} is broken", "mend it"),
                    fatal=True,
                )
            else:
                self.queue.complete(work)


@pytest.fixture(scope="module")
def place(new_state, tmp_path_factory):
    folder, state = tmp_path_factory.mktemp("root"), new_state()
    write_digits(folder / "images", 20)
    queue = open_queue(read_settings({"model": "pixels", "state_dir": str(state)}))
    with (
        serving("pixels", state_dir=state, jobs__roots=folder) as server,
        contextlib.closing(queue),
        Client(server.url) as client,
    ):
        place = Place(server.url, folder, queue, client)
        queue.heartbeat("hand", place.models[0], lease_s=LEASE_S)
        yield place


@pytest.fixture(autouse=True)
def nothing_left(place):
    yield
    while (work := place.claim()) is not None:
        place.queue.fail(work, JobProblem("cleared", "by a test"), fatal=True)


def test_a_job_is_submitted_watched_and_listed(place):
    job = place.submit()
    assert (job.kind, job.state, job.ended, job.problem) == ("embed", "queued", None, None)
    assert (job.top, job.threshold, job.embeddings) == (None, None, None)
    assert job.fingerprint == place.models[0]
    assert place.jobs.get(job.id) == job
    worker = threading.Thread(target=place.work_off)
    changes = place.jobs.watch(job.id)
    seen = [next(changes)]
    worker.start()
    seen += changes
    worker.join()
    assert [seen[0].state, seen[-1].state] == ["queued", "succeeded"]
    assert seen[-1].progress.done == seen[-1].progress.images == 20
    assert seen[-1] == place.jobs.get(job.id)
    assert seen[-1].created <= seen[-1].started <= seen[-1].ended
    assert job.id in [one.id for one in place.jobs.list(state="succeeded")]
    assert job.id not in [one.id for one in place.jobs.list(state="queued")]
    assert list(place.jobs.watch(job.id)) == [seen[-1]]


def test_the_key_makes_a_second_submission_the_first(place):
    paths = place.paths()
    first, second = (place.jobs.submit(*paths, kind="embed", key="mine") for _ in range(2))
    assert first.id == second.id
    with pytest.raises(RefusedConflict, match="writes to this output"):
        place.jobs.submit(*paths, kind="embed")
    with pytest.raises(RefusedConflict, match="idempotency key"):
        place.submit(key="mine")


def test_failures_are_told_and_retried(place):
    job = place.submit()
    place.work_off(fail=[0])
    failed = place.jobs.get(job.id)
    assert (failed.state, failed.problem.code, failed.problem.remedy) == (
        "failed",
        "broken",
        "mend it",
    )
    assert list(place.jobs.failures(job.id)) == []  # a fatal failure leaves no shard aside
    assert place.jobs.retry(job.id).state == "queued"
    place.work_off()
    assert place.jobs.get(job.id).state == "succeeded"
    with pytest.raises(RefusedConflict, match="must be failed or canceled"):
        place.jobs.retry(job.id)


def test_a_job_is_canceled(place):
    job = place.submit()
    assert place.jobs.cancel(job.id).state == "canceled"
    assert [each.state for each in place.jobs.watch(job.id)] == ["canceled"]


def test_what_cannot_be_done_is_refused(place):
    with pytest.raises(RefusedNotFound):
        place.jobs.get("0" * 20)
    with pytest.raises(RefusedNotFound):
        list(place.jobs.watch("0" * 20))
    with pytest.raises(RefusedInput, match="label jobs only"):
        place.submit(top=3)
    with pytest.raises(RefusedConflict, match="fetches no images"):
        place.submit(url_column="url")
    with pytest.raises(RefusedNotFound, match="without centers"):
        place.jobs.submit(*place.paths())
    with pytest.raises(RefusedInput, match="absolute"):
        place.jobs.submit("images", "/out", kind="embed")


def test_the_same_with_asyncio(place):
    async def all_of_it():
        async with AsyncClient(place.url) as client:
            job = await client.jobs.submit(*place.paths(), kind="embed")
            changes = client.jobs.watch(job.id)
            states = [(await anext(changes)).state]
            working = asyncio.create_task(asyncio.to_thread(place.work_off))
            states += [each.state async for each in changes]
            await working
            assert [states[0], states[-1]] == ["queued", "succeeded"]
            assert (await client.jobs.get(job.id)).id in [
                each.id async for each in client.jobs.list()
            ]
            assert [each async for each in client.jobs.failures(job.id)] == []
            other = await client.jobs.submit(*place.paths(), kind="embed")
            assert (await client.jobs.cancel(other.id)).state == "canceled"
            assert (await client.jobs.retry(other.id)).state == "queued"

    asyncio.run(all_of_it())


def test_a_server_without_jobs_says_so(server):
    with Client(server) as client, pytest.raises(RefusedConflict, match="takes no jobs"):
        client.jobs.submit("/in", "/out")


def test_the_page_of_the_client_is_true(place, capsys):
    (block,) = re.findall(
        r"^```python\n([^`]*client\.jobs[^`]*)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    source, out = place.paths()
    code = block.replace("/data/archive/*.tar", source).replace("/data/labels", out)
    code = code.replace("top=3", 'kind="embed"')
    worker = threading.Timer(0.5, place.work_off)
    worker.start()
    names = {"client": place.client}
    exec(compile(code, str(PAGE), "exec"), names)
    worker.join()
    assert names["job"].state == "succeeded"
    assert "20" in capsys.readouterr().out
