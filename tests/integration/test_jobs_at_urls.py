"""Jobs whose input and output are in an object store: machines that share nothing but that and the
queue in Redis.
"""

import contextlib
import json
import os
import random
import signal
import threading
import time

import httpx
import pytest

from mlcd.artifacts.manifest import MANIFEST
from mlcd.errors import Conflict, InvalidInput
from mlcd.pipelines.sync import sync
from mlcd.pipelines.verify_at_url import verify_at_url
from mlcd.progress import Reporter
from service.errors import BadRequest, OutsideRoots
from service.inference.engine.fake import FakeEncoder
from service.jobs.job import JobSpec
from service.jobs.roots import OtherRoots, Roots
from service.jobs.service import open_queue
from service.settings import read_settings
from service.worker.task import Watch
from tests.conftest import start_mlcd, write_digits
from tests.integration.running import Server
from tests.integration.s3 import (
    SECRET,
    check_alike,
    running_faults,
    running_moto,
    running_s3rver,
    using,
)
from tests.integration.test_observability import collector  # noqa: F401 - a fixture
from tests.unit.service.cached import redis_server
from tests.unit.service.worker.conftest import signals_as_they_were  # noqa: F401 - a fixture
from tests.unit.service.worker.working import MODEL, SLOW, work, working

ROOT = "s3://bucket/jobs"


@pytest.fixture(scope="module", params=["moto", pytest.param("s3rver", marks=pytest.mark.slow)])
def store(request, tmp_path_factory):
    is_moto = request.param == "moto"
    with running_moto() if is_moto else running_s3rver(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def used(store, tmp_path):
    with using(store, tmp_path):
        yield store


@pytest.fixture
def images(used, tmp_path):
    folder = write_digits(tmp_path / "images", 40)
    files = used.filesystem()
    if not files.exists("bucket/jobs/images"):  # or they would go inside
        files.put(str(folder), "bucket/jobs/images", recursive=True)
    return f"{ROOT}/images"


@pytest.fixture
def queue(tmp_path):
    with redis_server(tmp_path) as redis:
        asked = {"model": "hog", "redis_url": redis.url}
        with contextlib.closing(open_queue(read_settings(asked))) as opened:
            opened.url = redis.url
            yield opened


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Becomes another one, which has no copy of anything."""
    return lambda name: monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))


def spec(images, output, model=MODEL, kind="embed", **options):
    return JobSpec(kind, images, output, fingerprint=FakeEncoder(model).fingerprint, **options)


def done_here(queue, tmp_path, model=MODEL):
    """The same job on this machine."""
    queue.submit(spec(str(tmp_path / "images"), str(tmp_path / "out"), model))
    work(queue, tmp_path, model=model)
    return tmp_path / "out"


def perform(queue, worker, times):
    for _ in range(times):
        task = queue.claim("by hand", [FakeEncoder(MODEL).fingerprint], lease_s=60)
        outcome = worker._runner.perform(task, Watch(until_s=time.monotonic() + 60))
        worker._report_done(task, outcome)


def test_machines_without_a_common_folder_finish_a_job(used, queue, images, tmp_path, machine):
    expected = done_here(queue, tmp_path)
    job = queue.submit(spec(images, f"{ROOT}/out"))[0]
    machine("first")
    with working(queue, tmp_path, root=ROOT) as worker:
        perform(queue, worker, 3)  # the plan and two shards
    machine("second")
    with working(queue, tmp_path, root=ROOT) as worker:
        perform(queue, worker, 1)
    assert not used.filesystem().exists(f"bucket/jobs/out/{MANIFEST}")
    machine("third")
    work(queue, tmp_path, root=ROOT)
    done = queue.get(job.id)
    assert (done.state, done.shards_done, done.done) == ("succeeded", 5, 40)
    check_alike(used, "jobs/out", expected)
    kept = [path for path in (tmp_path / "third").rglob("*") if path.is_file()]
    assert all(path.name.endswith(".lock") for path in kept), kept


def test_a_selection_is_made_where_the_embeddings_are(used, queue, images, tmp_path, machine):
    asked = {"kind": "curate", "issues": ("dark",), "duplicates": 0.5, "report": True}
    made = done_here(queue, tmp_path)
    queue.submit(spec(str(made), str(tmp_path / "selected"), **asked))
    work(queue, tmp_path)
    queue.submit(spec(images, f"{ROOT}/rows"))
    machine("first")
    work(queue, tmp_path, root=ROOT)
    job = queue.submit(spec(f"{ROOT}/rows", f"{ROOT}/selected", **asked))[0]
    machine("second")
    work(queue, tmp_path, root=ROOT)
    assert queue.get(job.id).state == "succeeded", queue.get(job.id).problem
    check_alike(used, "jobs/selected", tmp_path / "selected")
    assert f"{ROOT}/rows" in [found.path for found in verify_at_url(job.spec.output)]
    sync(made, f"{ROOT}/of-others", Reporter("silent"))  # its images are in no root
    job = queue.submit(spec(f"{ROOT}/of-others", f"{ROOT}/not", kind="curate", report=True))[0]
    work(queue, tmp_path, root=ROOT)
    assert queue.get(job.id).problem.code == "forbidden"


def test_what_a_canceled_job_has_written_goes(used, queue, images, tmp_path, machine):
    job = queue.submit(spec(images, f"{ROOT}/canceled"))[0]
    machine("first")
    with working(queue, tmp_path, root=ROOT) as worker:
        perform(queue, worker, 3)
    assert used.filesystem().find("bucket/jobs/canceled")
    queue.cancel(job.id)
    machine("second")
    work(queue, tmp_path, root=ROOT)
    assert used.filesystem().find("bucket/jobs/canceled") == []


def test_urls_outside_of_the_roots_are_refused(used, images):
    roots = Roots([ROOT])
    assert roots.resolve_input(f"{images}/") == images
    for outside in (
        "s3://bucket/other",
        "s3://bucket/jobsx/in",
        "s3://bucket",
        f"{ROOT}/../other",
        "gs://bucket/jobs/in",
        f"s3://me:{SECRET}@bucket/jobs/x",
    ):
        with pytest.raises(OutsideRoots) as refused:
            roots.resolve_output(outside)
        assert SECRET not in str(refused.value)
    with pytest.raises(BadRequest, match="one plain URL"):
        roots.resolve_input(f"zip://a::{ROOT}/x")
    with pytest.raises(BadRequest, match="must be an absolute path"):
        Roots([]).resolve_input(images)
    with pytest.raises(OtherRoots):
        roots.check_places("s3://bucket/other", f"{ROOT}/out")
    roots.check_files([f"{images}/a.png"])
    for outside in ("s3://bucket/other/a.png", "/etc/passwd"):
        with pytest.raises(OutsideRoots):
            roots.check_files([outside])
    roots.check_input(images)
    used.filesystem().pipe_file("bucket/jobs/odd/manifest.json", b"{")
    for none in (images, f"{ROOT}/odd", f"{ROOT}/nothing"):
        with pytest.raises(InvalidInput, match="finished embeddings artifact"):
            roots.check_embeddings(none)
    roots.check_output(f"{ROOT}/free", input_of_job=images)
    with pytest.raises(InvalidInput, match="no images at s3://bucket/jobs/nothing"):
        roots.check_input(f"{ROOT}/nothing")
    with pytest.raises(InvalidInput, match="the output is in the input"):
        roots.check_output(f"{images}/out", input_of_job=images)
    files = used.filesystem()
    files.pipe_file("bucket/jobs/made/manifest.json", b"{}")
    files.pipe_file("bucket/jobs/begun/.request.json", b"{}")
    for taken, error, told in (
        ("made", Conflict, "the output exists already"),
        ("begun", Conflict, "there are files at the output"),
        ("made/inside", InvalidInput, "inside the output of another step"),
        ("a*", InvalidInput, "the output has wildcards"),
    ):
        with pytest.raises(error, match=told):
            roots.check_output(f"{ROOT}/{taken}", input_of_job=images)


def test_a_server_takes_such_jobs_and_no_secret_shows(
    used, queue, images, tmp_path, request, machine
):
    """Neither in an answer, the log, metrics, traces, the queue nor what is written."""
    traced = request.getfixturevalue("collector")
    settings = {"jobs__roots": ROOT, "redis_url": queue.url, "tracing__endpoint": traced.url}
    server = Server(MODEL, engine="fake", log__format="json", log__level="debug", **settings)
    answers = []

    def submit(**changes):
        asked = {"kind": "embed", "input": images, "output": f"{ROOT}/served"} | changes
        answers.append(httpx.post(f"{server.url}/v1/jobs", json=asked, timeout=30))
        return answers[-1].status_code

    try:
        server.wait_ready()
        assert submit(output="s3://bucket/elsewhere") == 403
        assert submit(input=f"s3://me:{SECRET}x@bucket/jobs") == 403
        assert submit(input=f"{ROOT}/nothing") == 422
        assert submit(kind="index") == 400
        assert submit(kind="curate", duplicates=0.9) == 422
        assert submit() == 202
        job = answers[-1].json()["id"]
        machine("worker")
        work(queue, tmp_path, root=ROOT)
        assert submit() == 409
        seen = (f"/v1/jobs/{job}", f"/v1/jobs/{job}/events", "/v1/jobs", "/v1/info", "/metrics")
        answers += [httpx.get(f"{server.url}{path}", timeout=30) for path in seen]
        assert answers[-5].json()["state"] == "succeeded"
    finally:
        _, said = server.stop()
    shown = "".join(f"{answer.headers}{answer.text}" for answer in answers) + said
    shown += "".join(str(span) for span in traced.spans)
    assert images in shown
    assert traced.spans
    assert SECRET not in shown.replace(f"{SECRET}x", "")
    files = used.filesystem()
    written = [files.cat_file(name) for name in files.find("bucket/jobs/served")]
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == 12
    assert not any(SECRET.encode() in content for content in written + kept)


@pytest.fixture
def apart(queue, tmp_path):
    """Starts commands whose work is of this queue, each as on a machine of its own: their
    settings, and a function that makes a worker.
    """
    settings = {"jobs__roots": ROOT, "jobs__shard_images": 8, "jobs__lease_s": 2, "engine": "fake"}
    settings["redis_url"] = queue.url
    given = {f"MLCD_{name.upper()}": str(value) for name, value in settings.items()}

    def start(name, store_url, *more):
        own = {"XDG_CACHE_HOME": str(tmp_path / name), "AWS_ENDPOINT_URL": store_url}
        return start_mlcd("worker", "--model", SLOW, *more, env={**os.environ, **given, **own})

    return settings, start


def check_nothing_half(files):
    """Every artifact with a manifest is whole."""
    for path in files.glob(f"bucket/jobs/out-*/{MANIFEST}"):
        assert list(verify_at_url(f"s3://{path.rpartition('/')[0]}"))


@pytest.fixture
def atomic(store, request):
    """A store that keeps whole objects only, as S3 does."""
    if request.node.callspec.params["store"] == "s3rver":
        pytest.skip(
            "s3rver keeps as an object what a client had sent when it was killed, and answers 500"
            " to a listing beside a removal"
        )


@pytest.mark.slow
def test_workers_that_are_killed_leave_nothing_half(atomic, used, queue, images, tmp_path, apart):
    """Ten kills at random moments; then two workers share what is left."""
    expected, (_, start) = done_here(queue, tmp_path, SLOW), apart
    chance, files, told, submitted = random.Random(1), used.filesystem(), "", []
    with running_faults(used, seed=4, rate=0.01, delay_s=0.01) as faults:
        for number in range(10):
            name = f"{ROOT}/out-{number}"
            job = queue.submit(spec(images, name, SLOW))[0]
            submitted.append(job.id)
            process, before = start(f"lost-{number}", faults.url), faults.requests
            until = before + chance.randint(20, 120)
            while faults.requests < until and queue.get(job.id).state in ("queued", "running"):
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            told += process.communicate(timeout=60)[0]
            check_nothing_half(files)
        for job_id in submitted:  # three kills at one shard, and it counts as poison
            if queue.get(job_id).state == "failed":
                queue.retry(job_id)
        for process in [start(name, faults.url, "--drain") for name in ("first", "second")]:
            told += process.communicate(timeout=240)[0]
            assert process.returncode == 0, told
    jobs = [queue.get(job_id) for job_id in submitted]
    assert {job.state for job in jobs} == {"succeeded"}, [job.problem for job in jobs]
    for number in range(10):
        check_alike(used, f"jobs/out-{number}", expected)
    assert SECRET not in told
    assert SECRET not in json.dumps([str(job) for job in queue.page(limit=20).jobs])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_servers_that_are_killed_lose_no_job_and_leave_nothing_half(
    atomic, used, queue, images, tmp_path, apart, monkeypatch
):
    """Ten kills, of every second server with its worker; some while a job is submitted."""
    expected, (settings, start) = done_here(queue, tmp_path, SLOW), apart
    name = "out-of-servers"  # the store may hold what another test has made
    chance, files, accepted = random.Random(2), used.filesystem(), []
    machines = contextlib.ExitStack()
    with running_faults(used, seed=5, rate=0.01, delay_s=0.01) as faults, machines:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faults.url)

        def begin(number):
            worker = start(f"machine-{number}", faults.url)
            machines.callback(end, worker)
            return worker

        server, worker = Server(SLOW, **settings), begin(0)
        machines.callback(lambda: end(server.process))
        for number in range(10):
            asked = {"kind": "embed", "input": images, "output": f"{ROOT}/{name}-{number}"}

            def submit(asked=asked, number=number):
                head = {"Idempotency-Key": f"out-{number}"}
                try:
                    url = f"{server.url}/v1/jobs"
                    return httpx.post(url, json=asked, headers=head, timeout=30).json()
                except httpx.TransportError as error:
                    return {"error": repr(error)}

            server.wait_ready()
            until, latest = faults.requests + chance.randint(1, 60), time.monotonic() + 10
            asking = threading.Thread(target=submit)
            asking.start()
            while faults.requests < until and time.monotonic() < latest:
                time.sleep(0.002)
            end(server.process)
            if number % 2:
                end(worker)
                worker = begin(number)
            asking.join()
            check_nothing_half(files)
            server.start_again()
            server.wait_ready()
            answers = [submit()]
            while "id" not in answers[-1] and len(answers) < 5:
                answers.append(submit())
            assert "id" in answers[-1], answers
            accepted.append(answers[-1]["id"])
        for number, job_id in enumerate(accepted):
            wait_for_end(queue, job_id)
            check_alike(used, f"jobs/{name}-{number}", expected)
    assert len(set(accepted)) == 10
    assert len(queue.page(limit=20).jobs) == 10 + 1  # and the one that was done here


def end(process):
    process.kill()
    process.communicate(timeout=60)


def wait_for_end(queue, job_id):
    """Until it has succeeded; three kills at one shard, and it counts as poison."""
    deadline = time.monotonic() + 120
    while (state := queue.get(job_id).state) != "succeeded":
        assert time.monotonic() < deadline
        if state == "failed":
            queue.retry(job_id)
        time.sleep(0.1)
