"""Jobs whose input and output are in an object store: machines that share nothing but that and the
queue in Redis.
"""

import contextlib
import time

import httpx
import pytest

from mlcd.artifacts.manifest import MANIFEST
from mlcd.errors import Conflict, InvalidInput
from mlcd.pipelines.sync import sync
from mlcd.pipelines.verify_at_url import verify_at_url
from mlcd.progress import Reporter
from mlcd.service.errors import BadRequest, OutsideRoots
from mlcd.service.inference.engine.fake import FakeEncoder
from mlcd.service.jobs.job import JobSpec
from mlcd.service.jobs.roots import OtherRoots, Roots
from mlcd.service.jobs.service import open_queue
from mlcd.service.settings import read_settings
from mlcd.service.worker.task import Watch
from tests.conftest import write_digits
from tests.integration.running import Server
from tests.integration.s3 import (
    SECRET,
    check_alike,
    running_moto,
    running_s3rver,
    using,
)
from tests.integration.test_observability import collector  # noqa: F401 - a fixture
from tests.unit.service.cached import redis_server
from tests.unit.service.worker.conftest import signals_as_they_were  # noqa: F401 - a fixture
from tests.unit.service.worker.working import MODEL, work, working

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
    with pytest.raises(InvalidInput, match="the output must be outside the input"):
        roots.check_output(f"{images}/out", input_of_job=images)
    files = used.filesystem()
    files.pipe_file("bucket/jobs/made/manifest.json", b"{}")
    files.pipe_file("bucket/jobs/begun/.request.json", b"{}")
    for taken, error, told in (
        ("made", Conflict, "the output exists already"),
        ("begun", Conflict, "there are files at the output"),
        ("made/inside", InvalidInput, "outside the output of another step"),
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
