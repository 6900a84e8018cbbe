"""An unfinished output has an owner, who alone discards it: as a whole, and never while somebody
works in it.
"""

import tempfile
from pathlib import Path

import pytest

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Request, draft_path, open_artifact
from mlcd.encoders.pixels import PixelsEncoder
from mlcd.errors import Conflict
from mlcd.images.sources import open_source
from mlcd.label_job import LabelJob
from mlcd.pipelines.embed import embed
from mlcd.pipelines.ownership import NotRemoved, claim, discard, give_up, owner_of, take_over
from mlcd.pipelines.shard import Equipment, open_shards
from mlcd.pipelines.shard import discard as discard_job
from mlcd.progress import Reporter
from tests.conftest import write_digits
from tests.unit.nobody import nobody

HIDDEN = ".out.partial.discarded"


@pytest.fixture
def folder():
    """A folder that others than its owner may enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


def test_what_somebody_is_at_work_in_stays(tmp_path):
    path = tmp_path / "out.partial"
    with Draft(tmp_path / "out", Request("labels")) as draft:
        draft.write_json(".owner.json", "job")
        with pytest.raises(Conflict, match="another process is writing"):
            discard(path, "job")
        give_up(path, "job")
        assert owner_of(path) == "job"
        take_over(draft)
        discard(path, "job")
        draft.publish()
    assert open_artifact(tmp_path / "out").kind == "labels"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_discarding_begins_nothing_where_nothing_is(tmp_path):
    discard(tmp_path / "out.partial", "job")
    claim(tmp_path / "out.partial", "job")
    discard(tmp_path / "out.partial", "another")
    assert owner_of(tmp_path / "out.partial") == "job"
    discard(tmp_path / "out.partial", "job")
    assert list(tmp_path.iterdir()) == []


def test_who_goes_on_with_the_work_of_a_job_has_it_from_then_on(tmp_path, monkeypatch):
    """`mlcd embed` on the input of a failed job, which is meanwhile retried and canceled."""
    images, encoder, out = write_digits(tmp_path / "images", 60), PixelsEncoder(), tmp_path / "out"
    job = LabelJob("embed", str(images), str(out))
    shards = open_shards(job, Equipment(encoder, None, num_threads=1), owner="job")
    shards.plan()
    encode, batches = encoder.encode, []

    def discarded_meanwhile(pixels):
        batches.append(len(pixels))
        discard_job(job, owner="job")
        assert draft_path(out).is_dir()
        return encode(pixels)

    monkeypatch.setattr(encoder, "encode", discarded_meanwhile)
    made = embed(open_source(str(images)), encoder, out, Reporter("silent"))
    assert (made.summary["images"], sum(batches)) == (60, 60)
    shards.publish(lambda done, errors: None)  # the retried job finds it done


def test_what_cannot_be_removed_is_named_and_removed_when_it_can_be(folder):
    path = folder / "out.partial"
    with nobody():
        claim(path, "job")
        (path / "part").touch()
        path.chmod(0o555)
        for _ in range(2):
            with pytest.raises(
                NotRemoved, match=rf"{HIDDEN} cannot be removed: no permission: let the user"
            ):
                discard(path, "job")
        assert [entry.name for entry in folder.iterdir()] == [HIDDEN]
        (folder / HIDDEN).chmod(0o755)
        discard(path, "job")
    assert list(folder.iterdir()) == []


def test_what_cannot_be_moved_is_named_and_whole(folder):
    path = folder / "outs" / "out.partial"
    path.parent.mkdir()
    path.parent.chmod(0o777)
    with nobody():
        claim(path, "job")
    path.parent.chmod(0o555)
    with (
        nobody(),
        pytest.raises(NotRemoved, match=r"outs/out\.partial cannot be removed: no permission"),
    ):
        discard(path, "job")
    assert owner_of(path) == "job"
    path.parent.chmod(0o777)
    with nobody():
        discard(path, "job")
    assert list(path.parent.iterdir()) == []


def test_a_removal_goes_on_where_it_was_interrupted(tmp_path):
    claim(tmp_path / "out.partial", "job")
    (tmp_path / "out.partial").rename(tmp_path / HIDDEN)
    discard(tmp_path / "out.partial", "another")
    assert list(tmp_path.iterdir()) == []
