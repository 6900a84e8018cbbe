"""A worker's inputs and outputs that are gone, lead elsewhere, or have names that are not text."""

import logging
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlcd.artifacts.manifest import draft_path
from mlcd.errors import Conflict
from mlcd.service.worker.failures import problem_of
from tests.unit.service.worker.working import archived, planned_by_hand, spec, work, working

pytestmark = pytest.mark.usefixtures("short_pauses")


def test_an_input_that_is_gone_fails_at_the_first_try(queue, images, tmp_path, caplog):
    job = queue.submit(spec(images, tmp_path))[0]
    shutil.rmtree(images)
    work(queue, tmp_path)
    assert queue.get(job.id).problem.code == "not-found"
    assert len(caplog.records) == 1


def test_links_that_lead_out_of_the_roots_are_not_followed(
    queue, images, tmp_path, tmp_path_factory, caplog
):
    """Nor those that were made after the job was accepted."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "secret.tar"
    archived(images / "0", tmp_path / "a.tar")
    archived(images / "1", elsewhere)
    (tmp_path / "b.tar").symlink_to(elsewhere)
    job = queue.submit(spec(tmp_path / "*.tar", tmp_path))[0]
    work(queue, tmp_path)
    failed = queue.get(job.id)
    assert failed.state == "failed"
    assert (failed.problem.code, str(elsewhere) in failed.problem.message) == ("forbidden", False)
    assert (failed.stage, len(caplog.records)) == ("plan", 1)  # it was not even listed
    assert not list(draft_path(tmp_path / "out").glob("part-*"))


def moved_away(folder, elsewhere):
    """Moves the folder away, as anyone who may write in a root could do while a job waits."""
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)


@pytest.mark.parametrize("stage", ["plan", "shard", "publish"])
def test_an_output_whose_folder_was_replaced_by_a_link_is_not_written(
    queue, images, tmp_path, tmp_path_factory, stage
):
    place, elsewhere = tmp_path / "place", tmp_path_factory.mktemp("outside") / "place"
    place.mkdir()
    job = queue.submit(spec(images, tmp_path, output=str(place / "out")))[0]
    with working(queue, tmp_path) as worker:
        make = worker._runner.perform

        def perform(task, watch):
            if task.stage == stage and not place.is_symlink():
                moved_away(place, elsewhere)
                perform.before = sorted(elsewhere.rglob("*"))
            return make(task, watch)

        worker._runner.perform = perform
        worker.run(drain=True)
    failed = queue.get(job.id)
    assert (failed.state, failed.problem.code, failed.stage) == ("failed", "forbidden", stage)
    assert sorted(elsewhere.rglob("*")) == perform.before


def test_an_input_or_output_that_leads_elsewhere_in_the_roots_fails_its_job_at_once(
    queue, images, tmp_path, caplog
):
    queue.submit(spec(images, tmp_path))
    draft_path(tmp_path / "out").symlink_to(tmp_path)
    moving = queue.submit(spec(images, tmp_path, output=str(tmp_path / "other")))[0]
    work(queue, tmp_path)
    assert queue.get(moving.id).state == "succeeded"
    moved_away(images, tmp_path / "images-2")
    queue.submit(spec(images, tmp_path, output=str(tmp_path / "third")))
    work(queue, tmp_path)
    codes = {
        Path(job.spec.output).name: job.problem and job.problem.code
        for job in queue.page(limit=9).jobs
    }
    assert codes == {"out": "place-moved", "other": None, "third": "place-moved"}
    assert len(caplog.records) == 2
    assert not (tmp_path / "third.partial").exists()


def test_a_worker_with_other_roots_leaves_a_job_and_what_it_has_written_to_others(
    queue, images, tmp_path, caplog
):
    (tmp_path / "mine").mkdir()
    job = queue.submit(spec(images, tmp_path))[0]
    with caplog.at_level(logging.WARNING):
        work(queue, tmp_path, root=tmp_path / "mine")
    left = queue.get(job.id)
    assert (left.state, left.problem.code) == ("running", "other-roots")
    assert not draft_path(tmp_path / "out").exists()
    queue.finish_plan(*planned_by_hand(queue, tmp_path, shard_images=8))
    queue.cancel(job.id)
    work(queue, tmp_path, root=tmp_path / "mine")
    assert draft_path(tmp_path / "out").exists()
    assert queue.get(job.id).stage == "discard"
    assert len(caplog.records) == 2
    work(queue, tmp_path)
    assert not draft_path(tmp_path / "out").exists()


def test_names_that_are_no_text_are_told_and_end_no_worker(queue, tmp_path, caplog):
    """Surrogates cannot be kept as JSON, escapes would be run by terminals."""
    name = os.fsdecode(b"caf\xe9\x1b[31m.parquet")
    with (tmp_path / name).open("wb") as file:
        pq.write_table(pa.table({"text": ["a"]}), file)
    job = queue.submit(spec(tmp_path / "*.parquet", tmp_path))[0]
    work(queue, tmp_path)
    failed = queue.get(job.id)
    assert failed.state == "failed"
    assert failed.problem.message.isprintable()
    assert "caf\\xe9\\x1b[31m.parquet" in failed.problem.message
    assert "caf\\xe9\\x1b[31m.parquet lacks an image column" in caplog.records[0].message


def test_a_problem_can_be_kept_whatever_a_file_is_called():
    told = problem_of(
        Conflict(os.fsdecode(b"/caf\xe9\n.tar changed"), remedy=os.fsdecode(b"mend \xff"))
    )
    assert (told.message, told.remedy) == ("/caf\\xe9\\n.tar changed", "mend \\xff")
