"""Faults that pass, and disks that go away: neither may cost a job an image, or lead it to another
place.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mlcd.artifacts.manifest import draft_path, open_artifact
from mlcd.encoders.pixels import PixelsEncoder
from mlcd.errors import InvalidInput, Unavailable
from mlcd.label_job import LabelJob
from mlcd.pipelines.shard import Equipment, InputChanged, OtherSettings, OutputGone, open_shards
from tests.conftest import write_digits
from tests.unit.nobody import nobody, open_folder


def opened(job, equipment, part_entries=10):
    return open_shards(job, equipment, owner="job", part_entries=part_entries)


@pytest.fixture
def equipment():
    return Equipment(PixelsEncoder(), None, num_threads=2)


@pytest.fixture
def folder():
    with open_folder() as opened:
        yield opened


@pytest.fixture
def job(folder):
    write_digits(folder / "images", 20)
    (folder / "outs").mkdir(mode=0o777)
    (folder / "outs").chmod(0o777)
    return LabelJob("embed", str(folder / "images"), str(folder / "outs" / "out"))


def nothing(done, errors):
    del done, errors


def test_images_that_cannot_be_read_are_tried_again_before_they_are_listed(job, equipment, folder):
    closed = sorted((folder / "images").rglob("*.png"))[:2]
    for path in closed:
        path.chmod(0)
    with nobody():
        shards = opened(job, equipment)
        shards.plan()
        with pytest.raises(Unavailable, match=r"2 images could not be read, the first \d/\d+\.png"):
            shards.make(0, nothing, is_last_try=False)
    for path in closed:
        path.chmod(0o644)
    with nobody():
        assert shards.make(0, nothing, is_last_try=False) == 0


def test_what_cannot_be_read_for_good_is_listed_by_the_last_try(job, equipment, folder):
    min((folder / "images").rglob("*.png")).chmod(0)
    with nobody():
        shards = opened(job, equipment)
        shards.plan()
        assert shards.make(0, nothing, is_last_try=True) == 1
        assert shards.make(1, nothing, is_last_try=False) == 0


@pytest.mark.parametrize("kind", ["embed", "index"])
@pytest.mark.parametrize("gone", ["parent", "draft"])
def test_an_output_whose_disk_went_away_is_not_begun_anew_elsewhere(job, equipment, kind, gone):
    job = replace(job, kind=kind)
    out = Path(job.output)
    shards = opened(job, equipment)
    shards.plan()
    shards.make(0, nothing)
    away = out.parent if gone == "parent" else draft_path(out)
    shutil.move(away, away.with_name("away"))
    for step in (lambda: shards.make(1, nothing), lambda: shards.publish(nothing)):
        with pytest.raises(OutputGone, match="does not contain this work any more"):
            step()
    assert not away.exists()
    shutil.move(away.with_name("away"), away)
    assert shards.make(1, nothing) == 0
    shards.publish(nothing)
    assert out.is_dir()


def test_what_another_user_made_does_not_keep_from_publishing_and_nothing_of_it_is_lost(job):
    with nobody():
        shards = opened(job, equipment=Equipment(PixelsEncoder(), None, num_threads=2))
        shards.plan()
        for shard in (0, 1):
            shards.make(shard, nothing)
    if os.geteuid() != 0:
        pytest.skip("only root may give files away")
    part = draft_path(Path(job.output)) / "part-00000.npy"
    os.chown(part, 0, 0)
    part.chmod(0o640)
    os.chown(part, 0, 65534)
    with nobody(), pytest.raises(InvalidInput, match="no permission"):
        shards.publish(nothing)
    assert part.is_file()
    part.chmod(0o644)  # as the manifest: nothing is to be changed
    with nobody():
        shards.publish(nothing)
    assert open_artifact(Path(job.output)).files["part-00000.npy"].size_bytes > 0


def test_who_lists_other_shards_is_told_before_any_is_made(job, equipment, folder):
    opened(job, equipment).plan()
    opened(job, equipment).check()
    with pytest.raises(OtherSettings):
        opened(job, equipment, part_entries=20).check()
    shutil.rmtree(folder / "images" / "0")
    with pytest.raises(InputChanged):
        opened(job, equipment).check()
    shutil.rmtree(draft_path(Path(job.output)))
    with pytest.raises(OutputGone):
        opened(job, equipment).check()


@pytest.mark.parametrize("kind", ["embed", "index"])
def test_images_without_a_result_are_counted_when_the_output_is_there_already(
    job, equipment, folder, kind
):
    (folder / "images" / "0" / "0000.png").write_bytes(b"no image")
    wanted = replace(job, kind=kind)
    shards = opened(wanted, equipment)
    shards.plan()
    found = [shards.make(shard, nothing) for shard in (0, 1)]
    shards.publish(nothing)
    again = opened(wanted, equipment)
    again.check()
    assert [again.make(shard, nothing) for shard in (0, 1)] == found == [1, 0]
