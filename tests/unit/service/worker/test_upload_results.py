"""The results of a job on an upload, in this process on a real queue."""

import time
import zipfile

import pytest

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.pipelines.shard import Equipment
from mlcd.service.inference.engine.fake import FakeEncoder
from mlcd.service.jobs.files import FileStore
from mlcd.service.jobs.job import UploadedInput
from mlcd.service.jobs.roots import Roots
from mlcd.service.settings import Files
from mlcd.service.worker.task import TaskRunner, Watch
from mlcd.service.worker.upload_results import UploadResults
from tests.conftest import write_digits
from tests.unit.service.worker.working import MODEL, spec


@pytest.fixture
def files(tmp_path):
    store = FileStore(tmp_path / "files", Files())
    yield store
    store.close()


@pytest.fixture
def uploaded(files, tmp_path):
    packed = tmp_path / "digits.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for path in sorted(write_digits(tmp_path / "digits", 10).rglob("*.png")):
            archive.write(path, path.name)
        archive.writestr("broken.png", b"no image")
    with files.begin(None) as draft:
        draft.write(packed.read_bytes())
        return draft.finish("digits.zip", "images")


@pytest.mark.parametrize("num_written", [0, 1])
def test_a_crash_between_results_or_before_the_report_changes_nothing(
    queue, files, uploaded, tmp_path, monkeypatch, num_written
):
    work_folder = tmp_path / "files" / "job-1"
    upload = UploadedInput("digits.zip", None, {"parquet": "file-1.parquet", "errors": "file-1.e"})
    job = spec(files.path(uploaded.id), tmp_path, output=str(work_folder), upload=upload)
    job_id = queue.submit(job)[0].id
    runner = TaskRunner(
        Equipment(FakeEncoder(MODEL), None, num_threads=2),
        Roots([str(tmp_path)]),
        UploadResults(files),
        shard_images=8,
    )

    def perform():
        task = queue.claim("w", [runner.fingerprint], lease_s=60)
        return task, runner.perform(task, Watch(until_s=time.monotonic() + 60))

    task, outcome = perform()
    queue.finish_plan(task, outcome.sizes)
    for _ in outcome.sizes:
        queue.complete(perform()[0])

    publish, published = FileStore.publish, []

    def crash(store, *arguments, **options):
        if len(published) == num_written:
            raise KeyboardInterrupt
        published.append(arguments)
        return publish(store, *arguments, **options)

    with monkeypatch.context() as patch:  # the process dies while it writes a result
        patch.setattr(FileStore, "publish", crash)
        task = queue.claim("w", [runner.fingerprint], lease_s=60)
        with pytest.raises(KeyboardInterrupt):
            runner.perform(task, Watch(until_s=time.monotonic() + 60))
        queue.release(task)
    assert EmbeddingsArtifact.open(work_folder).num_rows == 10
    task, _ = perform()
    written = files.path("file-1.parquet").read_bytes()
    queue.release(task)  # it died before the report
    task, _ = perform()
    queue.complete(task)
    assert queue.get(job_id).state == "succeeded"
    assert files.path("file-1.parquet").read_bytes() == written
    assert not work_folder.exists()
    assert sorted(path.name for path in files.folder.glob("file-*")) == sorted(
        [uploaded.id, "file-1.e", "file-1.parquet"]
    )
