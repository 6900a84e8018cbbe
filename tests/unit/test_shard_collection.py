"""An index job after its images: nothing finished is thrown away, and who was thought dead does no
harm.
"""

import contextlib
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlcd.artifacts.manifest import draft_path
from mlcd.collections.collection import Collection
from mlcd.encoders.pixels import PixelsEncoder
from mlcd.errors import ArtifactInvalid, Conflict, InvalidInput
from mlcd.fetching.url_options import UrlOptions
from mlcd.images.thumbnail import thumbnail
from mlcd.label_job import LabelJob
from mlcd.pipelines.attempt import Attempt
from mlcd.pipelines.shard import Equipment, ThumbnailChoice, discard, open_shards
from tests.conftest import write_digits
from tests.image_host import ImageHost, ok
from tests.unit.nobody import nobody, open_folder

NUM_IMAGES = 40


def opened(job, equipment, part_entries=20):
    return open_shards(job, equipment, owner="job", part_entries=part_entries)


@pytest.fixture
def equipment():
    return Equipment(PixelsEncoder(), None, num_threads=1)


@pytest.fixture
def folder():
    with open_folder() as opened:
        (opened / "outs").mkdir()
        (opened / "outs").chmod(0o777)
        yield opened


@pytest.fixture
def job(folder):
    images = write_digits(folder / "images", NUM_IMAGES)
    return LabelJob("index", str(images), str(folder / "outs" / "out"))


@pytest.fixture
def planned(job, equipment):
    shards = opened(job, equipment)
    shards.plan()
    return shards


def nothing(done, errors):
    del done, errors


def names(folder):
    return sorted(path.name for path in (folder / "outs").iterdir())


def assert_complete(out):
    with Collection.open(out, background=False) as collection:
        assert (len(collection), collection.describe().indexed) == (NUM_IMAGES, NUM_IMAGES)
    assert sorted(path.name for path in out.glob("*")) == [
        ".owner.json",
        "errors.jsonl",
        "index",
        "items.sqlite",
        "lock",
    ]


def test_embeddings_stay_when_the_collection_cannot_be_put_in_its_place(job, equipment, folder):
    with nobody():
        shards = opened(job, equipment)
        shards.plan()
    (folder / "outs").chmod(0o555)
    with nobody(), pytest.raises(InvalidInput, match="out cannot be written: no permission"):
        shards.publish(nothing)
    assert names(folder) == ["out.partial"]
    assert sorted(path.name for path in draft_path(Path(job.output)).iterdir()) == [
        ".owner.json",
        "embeddings",
    ]
    (folder / "outs").chmod(0o777)
    (folder / "images" / "0" / "0000.png").write_bytes(b"it is not read again")
    with nobody():
        shards.publish(nothing)
    assert_complete(Path(job.output))
    assert names(folder) == ["out"]


def test_embeddings_go_where_no_image_could_be_used(job, equipment, folder):
    for path in (folder / "images").rglob("*.png"):
        path.write_bytes(b"no image")
    shards = opened(job, equipment)
    shards.plan()
    with pytest.raises(InvalidInput, match="none of the 40 files"):
        shards.publish(nothing)
    assert names(folder) == []


def test_a_key_that_no_item_can_have_is_told_before_there_is_any_work(job, equipment, folder):
    deep = folder / "images" / Path(*("a" * 200,) * 6)
    deep.mkdir(parents=True)
    (deep / "last.png").touch()
    with pytest.raises(
        InvalidInput,
        match=r"^a{40}…a{31}/last\.png of .* cannot be an item of a collection: shorten .*1024 bytes",
    ):
        opened(job, equipment).plan()
    assert names(folder) == []
    opened(replace(job, kind="embed"), equipment).plan()


def test_a_class_that_no_item_can_have_is_told_before_there_is_any_work(job, equipment, folder):
    data = next((folder / "images").rglob("*.png")).read_bytes()
    table = pa.table({"key": ["a", "b"], "image": [data, data], "label": ["short", "long" * 5000]})
    pq.write_table(table, folder / "images.parquet")
    with pytest.raises(
        InvalidInput, match=r"^b of .*images\.parquet cannot be an item of a collection: shorten"
    ):
        opened(replace(job, input=str(folder / "images.parquet")), equipment).plan()
    assert names(folder) == []


def finish(job, equipment):
    opened(job, equipment).publish(nothing)


def discard_all(job, equipment):
    del equipment
    discard(job, owner="job")


def begin_anew(job, equipment):
    """A job that was canceled and retried: the same owner, at the same place."""
    discard(job, owner="job")
    opened(job, equipment).plan()


LEFT = {finish: ["out"], discard_all: [], begin_anew: ["out.partial"]}


def frozen(shards, folder, meanwhile, on_done=nothing):
    """It goes on to its end, or is told; what the others left is as they left it."""
    with contextlib.suppress(Conflict, ArtifactInvalid):
        shards.publish(on_done)
    assert names(folder) == LEFT[meanwhile]
    if meanwhile is finish:
        assert_complete(folder / "outs" / "out")
    if meanwhile is begin_anew:
        partial = folder / "outs" / "out.partial"
        assert sorted(path.name for path in partial.iterdir()) == [
            ".owner.json",
            "embeddings.partial",
        ]
        assert list(partial.rglob("part-*")) == []


@pytest.mark.parametrize("meanwhile", LEFT)
@pytest.mark.parametrize("call", [1, 25, 44, 46, 48, 49])
def test_who_is_frozen_and_wakes_does_no_harm(planned, job, equipment, folder, meanwhile, call):
    """At images, and at each step after them, when it tells of it."""
    calls = 0

    def told(done, errors):
        nonlocal calls
        calls += 1
        if calls == call:
            meanwhile(job, equipment)

    frozen(planned, folder, meanwhile, told)
    assert calls >= call


@pytest.mark.parametrize("meanwhile", LEFT)
@pytest.mark.parametrize(
    "place",
    [
        "mlcd.pipelines.shard_collection.Attempt",
        "mlcd.pipelines.shard_collection.index",
        "mlcd.collections.folder.write_empty",
        "mlcd.collections.growth.write_generation",
        "mlcd.collections.generation.Draft",
        "mlcd.collections.generation._write_vectors",
        "mlcd.pipelines.shard_collection.write_owner",
        "mlcd.pipelines.attempt.Attempt.check",
    ],
)
def test_who_is_frozen_between_two_steps_and_wakes_does_no_harm(
    planned, job, equipment, folder, meanwhile, place, monkeypatch
):
    owner, name = place.rsplit(".", 1)
    found = Attempt if owner.endswith(".Attempt") else __import__(owner, fromlist=[name])
    step = getattr(found, name)
    steps = []

    def first_others(*arguments, **options):
        steps.append(place)
        if len(steps) == 1:
            meanwhile(job, equipment)
        return step(*arguments, **options)

    monkeypatch.setattr(place, first_others)
    frozen(planned, folder, meanwhile)
    assert steps


def test_what_a_killed_attempt_left_goes_when_the_next_one_begins(planned, job, folder):
    partial = draft_path(Path(job.output))
    (partial / "attempt-0123" / "collection").mkdir(parents=True)

    def stop(done, errors):
        if done:
            assert len(list(partial.glob("attempt-*"))) == 1
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        planned.publish(stop)
    assert list(partial.glob("attempt-*")) == []
    planned.publish(nothing)
    assert_complete(Path(job.output))
    assert names(folder) == ["out"]


def finished_with_thumbnails(job, equipment, max_bytes):
    """Made by two processes, one of which makes no thumbnails; returns how many items have one."""
    choice = ThumbnailChoice(side=32, max_bytes=max_bytes)
    shards = opened(job, replace(equipment, thumbnails=choice))
    shards.plan()
    assert opened(job, equipment).make(1, nothing) == 0
    shards.publish(nothing)
    with Collection.open(Path(job.output), background=False) as collection:
        lacking = set(collection.without_thumbnail())
        shown = [
            item.id for block in collection.items() for item in block if item.id not in lacking
        ]
        for item_id in shown:
            picture = collection.thumbnail(item_id).data
            assert picture == thumbnail((Path(job.input) / item_id).read_bytes(), side=32).data
        return len(shown)


@pytest.mark.parametrize(
    ("max_bytes", "num_shown"), [pytest.param(2**20, 20), pytest.param(1000, range(1, 20))]
)
def test_items_have_the_thumbnails_that_were_made_with_their_embeddings(
    job, equipment, folder, max_bytes, num_shown
):
    """Items of the shard that was made without have none, nor do those above the bound."""
    shown = finished_with_thumbnails(job, equipment, max_bytes)
    assert shown == num_shown if isinstance(num_shown, int) else shown in num_shown
    assert names(folder) == ["out"]


def test_images_at_urls_are_collected_with_thumbnails(job, equipment, folder):
    files = sorted((folder / "images").rglob("*.png"))
    bodies = {f"/{number}": ok(file.read_bytes()) for number, file in enumerate(files)}
    with ImageHost(bodies) as host:
        links = folder / "links.parquet"
        urls = [f"{host.url}/{number}" for number in range(len(files))]
        pq.write_table(pa.table({"link": urls}), links)
        fetching = UrlOptions(None, "127.0.0.1", "127.0.0.1/32", str(host.port))
        choice = ThumbnailChoice(side=32, max_bytes=2**20)
        shards = opened(
            replace(job, input=str(links), url_column="link"),
            replace(equipment, urls=fetching, thumbnails=choice),
        )
        shards.plan()
        assert sum(shards.make(shard, nothing) for shard in range(len(shards.sizes))) == 0
        shards.publish(nothing)
    with Collection.open(Path(job.output), background=False) as collection:
        assert len(collection) == len(urls)
        assert not list(collection.without_thumbnail())


def test_thumbnails_go_with_work_that_is_discarded(job, equipment, folder):
    choice = ThumbnailChoice(side=32, max_bytes=2**20)
    shards = opened(job, replace(equipment, thumbnails=choice))
    shards.plan()
    told = []

    def stop(done, errors):
        told.append(done)
        if len(told) == 7:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        shards.make(0, stop)
    partial = draft_path(Path(job.output))
    assert list(partial.rglob("*thumbnails*")) == []
    shards.make(0, nothing)
    assert len(list(partial.rglob("*thumbnails*"))) == 1
    discard(job, owner="job")
    assert names(folder) == []
