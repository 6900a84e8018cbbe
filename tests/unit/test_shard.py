"""The unit of work of a batch job: any process makes any shard, as often as it likes, and the bytes
are the same.
"""

import io
import json
import resource
import shutil
import tarfile
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.labels import LabelTable
from mlcd.artifacts.manifest import Request, draft_path, open_artifact
from mlcd.collections.collection import Collection
from mlcd.encoders.hog import HogEncoder
from mlcd.encoders.pixels import PixelsEncoder
from mlcd.errors import ArtifactInvalid, ConfigInvalid, Conflict, DiskFull, InvalidInput
from mlcd.fetching.url_options import UrlOptions
from mlcd.images.sources import open_source
from mlcd.label_job import LabelJob
from mlcd.pipelines.curate import CurateInputs, curate
from mlcd.pipelines.curation.decisions import CurateOptions
from mlcd.pipelines.embed import embed
from mlcd.pipelines.encoded import choose_part_entries
from mlcd.pipelines.label import LabelOptions, label
from mlcd.pipelines.ownership import claim
from mlcd.pipelines.shard import Equipment, InputChanged, OpenedCenters, discard, open_shards
from mlcd.pipelines.verify import verify
from mlcd.progress import Reporter
from mlcd.service.settings import read_settings
from tests.conftest import write_digits
from tests.image_host import ImageHost, ok
from tests.written_artifacts import write_centers

SILENT = Reporter("silent")
SIZES = [24, 24, 12]


@pytest.fixture(scope="module")
def equipment(tmp_path_factory) -> Equipment:
    encoder = PixelsEncoder()
    out = tmp_path_factory.mktemp("centers") / "centers"
    vectors = np.abs(np.random.default_rng(0).standard_normal((20, encoder.dimension)))
    artifact = write_centers(out, vectors, encoder.fingerprint)
    return Equipment(encoder, OpenedCenters(artifact, Centers.read(artifact)), num_threads=2)


@pytest.fixture
def images(tmp_path) -> Path:
    """60 images, one of them broken."""
    folder = write_digits(tmp_path / "images", 60)
    (folder / "3" / "0003.png").write_bytes(b"no image")
    return folder


@pytest.fixture
def archive(tmp_path, images) -> Path:
    """The same in a tar shard."""
    path = tmp_path / "shard.tar"
    with tarfile.open(path, "w") as tar:
        for file in sorted(images.rglob("*.png")):
            tar.add(file, file.relative_to(images))
    return path


def wanted_job(kind, images, tmp_path, **options) -> LabelJob:
    return LabelJob(kind, str(images), str(tmp_path / "out"), **options)


def opened(job, equipment, *, owner="job", part_entries=24, **more):
    return open_shards(job, equipment, owner=owner, part_entries=part_entries, **more)


def nothing(done, errors):
    del done, errors


def finish(shards, order=(2, 0, 1)):
    shards.plan()
    found = [shards.make(shard, nothing) for shard in order]
    shards.publish(nothing)
    return found


def finishing(other, out):
    """All is made by another one when the last image of a shard is done."""

    def told(done, errors):
        del errors
        if done == 24 and not out.exists():
            finish(other)

    return told


def by_command(wanted: LabelJob, equipment, out, part_entries=24) -> str:
    """The digest of what the commands make of the same."""
    if wanted.kind == "label":
        options = LabelOptions(
            wanted.input,
            str(equipment.centers.artifact.path),
            model="pixels",
            part_entries=part_entries,
        )
        return label(options, out, reporter=SILENT).digest
    return embed(open_source(wanted.input), equipment.encoder, out, SILENT).digest


@pytest.mark.parametrize("kind", ["label", "embed"])
@pytest.mark.parametrize("form", ["table", "list"])
def test_images_at_urls_are_those_of_the_command(kind, form, images, equipment, tmp_path):
    files = sorted(images.rglob("*.png"))
    with ImageHost(
        {f"/{number}": ok(file.read_bytes()) for number, file in enumerate(files)}
    ) as host:
        urls = [f"{host.url}/{number}" for number in range(len(files))] + ["http://10.0.0.1/a.png"]
        if form == "table":
            place, column = tmp_path / "links.parquet", "link"
            pq.write_table(pa.table({"link": urls}), place)
        else:
            place, column = tmp_path / "links.txt", None
            place.write_text("\n".join(urls))
        options = UrlOptions(column, "127.0.0.1", "127.0.0.1/32", str(host.port))
        fetching = replace(equipment, urls=replace(options, column=None))
        wanted = wanted_job(kind, place, tmp_path, url_column=column)
        shards = opened(wanted, fetching, part_entries=24 if kind == "label" else None)
        assert sum(finish(shards, reversed(range(len(shards.sizes))))) == 2
        made = open_artifact(Path(wanted.output))
        out = tmp_path / "by-command"
        if kind == "embed":
            source = open_source(str(place), urls=options)
            other = embed(source, equipment.encoder, out, SILENT)
        else:
            centers = str(equipment.centers.artifact.path)
            asked = LabelOptions(str(place), centers, model="pixels", part_entries=24, urls=options)
            other = label(asked, out, reporter=SILENT)
        assert made.digest == other.digest
        problems = made.file("errors.jsonl").read_text()
    assert '"unsupported-format"' in problems
    assert '"url-refused"' in problems


def test_the_errors_of_a_job_do_not_tell_what_its_fetches_have_seen(images, equipment, tmp_path):
    """A host inside is refused as one that does not exist is, and as the same URL is over REST."""
    fetch = {"allow": "127.0.0.1,127.0.0.2,localhost,absent.invalid", "networks": "127.0.0.1/32"}
    image = ok(next(images.rglob("*.png")).read_bytes())
    text = ok(b"text", "text/plain")
    with ImageHost({"/image": image, "/a": text}) as host, ImageHost({}) as inside:
        ports = f"{host.port},{inside.port}"
        urls = [
            f"http://127.0.0.2:{inside.port}/",
            f"http://absent.invalid:{inside.port}/",
            f"http://10.0.0.1:{inside.port}/",
            f"{host.url}/a",
            f"{host.url}/gone",
            f"{host.url}/image",
        ]
        (tmp_path / "links.txt").write_text("\n".join(urls))
        settings = read_settings({"model": "hog", "fetch": fetch | {"ports": ports}})
        fetching = replace(equipment, urls=settings.fetch.url_options)
        wanted = wanted_job("embed", tmp_path / "links.txt", tmp_path)
        shards = opened(wanted, fetching)
        finish(shards, range(len(shards.sizes)))
        assert inside.asked == []
    lines = open_artifact(Path(wanted.output)).file("errors.jsonl").read_text().splitlines()
    errors = [json.loads(line) for line in lines]
    said = [
        (each["reason"], each["detail"].removeprefix(f"{url}: "))
        for each, url in zip(errors, urls[:-1], strict=True)
    ]
    assert said[:3] == 3 * [("url-refused", "the URL's host is not one that may be fetched from")]
    assert said[3:] == 2 * [("fetch-failed", "the URL's host did not answer with an image")]


def test_images_at_urls_are_refused_where_nothing_is_fetched(images, equipment, tmp_path):
    pq.write_table(pa.table({"link": ["http://example.com/a.png"]}), tmp_path / "links.parquet")
    (tmp_path / "links.txt").write_text("http://example.com/a.png")
    table = wanted_job("embed", tmp_path / "links.parquet", tmp_path, url_column="link")
    with pytest.raises(ConfigInvalid, match="no images are fetched"):
        opened(table, equipment)
    with pytest.raises(InvalidInput, match="this command does not fetch"):
        opened(wanted_job("embed", tmp_path / "links.txt", tmp_path), equipment)


def test_labels_made_in_any_order_by_anybody_are_those_of_the_command(images, equipment, tmp_path):
    wanted = wanted_job("label", images, tmp_path)
    planner, worker = (opened(wanted, equipment) for _ in range(2))
    assert planner.sizes == SIZES
    planner.plan()
    assert [worker.make(shard, nothing) for shard in (2, 0)] == [0, 1]
    assert not Path(wanted.output).exists()
    assert planner.make(1, nothing) == 0
    worker.publish(nothing)
    made = open_artifact(Path(wanted.output))
    assert made.digest == by_command(wanted, equipment, tmp_path / "undisturbed")
    assert all(finding.checked for finding in verify(made.path))
    assert '"3/0003.png"' in made.file("errors.jsonl").read_text()
    assert made.summary["images"] == 59
    assert made.summary["errors"] == 1
    assert (
        sum(made.summary["scan"][level] for level in ("proven", "wider", "float32", "float64"))
        == 59
    )
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]


def test_embeddings_are_those_of_the_command(images, equipment, tmp_path):
    wanted = wanted_job("embed", images, tmp_path)
    finish(open_shards(wanted, equipment, owner="job"), order=(0,))
    digest = by_command(wanted, equipment, tmp_path / "undisturbed")
    assert EmbeddingsArtifact.open(Path(wanted.output)).artifact.digest == digest


@pytest.mark.parametrize(
    ("num_images", "num_parts"),
    [(1, 1), (256, 1), (257, 2), (3068, 12), (4097, 9), (32_768, 16), (1_000_000, 489)],
)
def test_a_few_thousand_images_are_tasks_for_several_workers(num_images, num_parts):
    assert -(-num_images // choose_part_entries(num_images)) == num_parts


def test_a_selection_is_that_of_the_command_whoever_makes_it(images, equipment, tmp_path):
    shutil.copyfile(images / "3" / "0013.png", images / "a copy.png")
    embed(open_source(str(images)), equipment.encoder, tmp_path / "embeddings", SILENT)
    given = {"duplicates": 0.99, "issues": ("dark",), "balance": 30, "report": True}
    wanted = LabelJob("curate", str(tmp_path / "embeddings"), str(tmp_path / "out"), **given)
    checked = []
    planner, worker = (opened(wanted, equipment, check_files=checked.extend) for _ in range(2))
    assert str(images) in checked
    assert str(tmp_path / "embeddings" / "part-00000.npy") in checked
    assert planner.sizes == [60]
    planner.plan()

    def stopped(done, errors):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        planner.make(0, stopped)
    told = []
    worker.make(0, lambda done, errors: told.append(done))
    assert told[-1] == 60
    assert len(told) > 60  # a sign of life with each image at least
    planner.publish(nothing)
    worker.publish(nothing)
    inputs = CurateInputs.open(tmp_path / "embeddings", centers=equipment.centers.artifact.path)
    made = curate(inputs, tmp_path / "command", CurateOptions(**given), SILENT)
    found = open_artifact(tmp_path / "out")
    assert (found.digest, found.summary) == (made.digest, made.summary)
    assert made.summary["duplicate"] >= 1
    other = Equipment(HogEncoder(), None, num_threads=1)
    with pytest.raises(ConfigInvalid, match="of another model"):
        opened(wanted, other)


def test_an_index_is_a_collection_and_nothing_beside_it(images, equipment, tmp_path):
    shards = opened(wanted_job("index", images, tmp_path), equipment)
    shards.plan()
    for shard in (2, 0, 1):
        shards.make(shard, nothing)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "out.partial"]
    shards.publish(nothing)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "out"]
    embed(open_source(str(images)), equipment.encoder, tmp_path / "embeddings", SILENT)
    expected = EmbeddingsArtifact.open(tmp_path / "embeddings")
    with Collection.open(tmp_path / "out", background=False) as collection:
        held = {item.id: item.embedding for block in collection.items() for item in block}
        assert held.keys() == set(expected.keys)
        assert all(
            (held[key] == row).all()
            for key, row in zip(expected.keys, expected.load(), strict=True)
        )
        shards.publish(nothing)  # by somebody who could not know, while another has it open
        assert shards.make(0, nothing) == 1
    assert (tmp_path / "out" / "errors.jsonl").read_bytes() == (
        tmp_path / "embeddings" / "errors.jsonl"
    ).read_bytes()
    assert '"3/0003.png"' in (tmp_path / "out" / "errors.jsonl").read_text()
    findings = list(verify(tmp_path / "out"))
    assert [(finding.kind, finding.checked) for finding in findings] == [
        ("collection-index", True),
        ("collection", True),
        ("images", True),
    ]
    (images / "9" / "0009.png").unlink()
    with pytest.raises(ArtifactInvalid, match="does not contain the images"):
        list(verify(tmp_path / "out"))


def test_two_indexes_and_whatever_has_a_name_like_theirs_do_not_meet(images, equipment, tmp_path):
    """The second at one place is told. Beside it only the name of the draft is taken."""
    wanted = wanted_job("index", images, tmp_path)
    first, second = (partial(opened, wanted, equipment, owner=owner) for owner in ("one", "two"))
    (tmp_path / "out.embeddings").mkdir()
    (tmp_path / "out.embeddings" / "mine").write_text("a user's")
    shards = first()
    shards.plan()
    with pytest.raises(Conflict, match="contains something else"):
        second().plan()
    with pytest.raises(Conflict, match="does not contain this work"):
        second().make(0, nothing)
    discard(wanted, owner="two")
    finish(shards)
    with pytest.raises(Conflict, match="exists"):
        second().plan()
    discard(wanted, owner="two")
    discard(wanted, owner="one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "out", "out.embeddings"]
    assert [path.name for path in (tmp_path / "out.embeddings").iterdir()] == ["mine"]


def test_an_index_tells_what_it_holds_and_then_what_is_indexed(images, equipment, tmp_path):
    shards = opened(wanted_job("index", images, tmp_path), equipment)
    shards.plan()
    shards.make(1, nothing)
    told = []
    shards.publish(lambda done, errors: told.append((done, errors)))
    moves = [done for done, _ in told if done]
    assert moves == sorted(moves)
    assert {60, 120} <= set(moves)  # of 60 images, one of them broken
    assert all(done in range(121) for done in moves)
    assert {errors for _, errors in told} == {0}


@pytest.mark.parametrize("stop_at", [60, 120])
def test_an_index_that_is_stopped_while_it_is_built_leaves_no_half_and_goes_on(
    images, equipment, tmp_path, stop_at
):
    wanted = wanted_job("index", images, tmp_path)
    shards = opened(wanted, equipment)

    def stop(done, errors):
        if done >= stop_at:
            raise RuntimeError("stopped")

    def stopped():
        shards.plan()
        with pytest.raises(RuntimeError, match="stopped"):
            shards.publish(stop)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "out.partial"]

    stopped()
    discard(wanted, owner="job")
    assert [path.name for path in tmp_path.iterdir()] == ["images"]
    stopped()
    opened(wanted, equipment).publish(nothing)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "out"]
    with Collection.open(tmp_path / "out", background=False) as collection:
        assert (len(collection), collection.describe().indexed) == (59, 59)


def test_who_makes_a_shard_after_the_end_of_an_index_leaves_nothing(images, equipment, tmp_path):
    wanted = wanted_job("index", images, tmp_path)
    late, other = (opened(wanted, equipment) for _ in range(2))
    late.plan()

    with pytest.raises(Conflict, match="was published or removed meanwhile"):
        late.make(0, finishing(other, tmp_path / "out"))
    assert late.make(1, nothing) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "out"]


def test_who_begins_at_the_very_end_of_an_index_leaves_nothing(
    images, equipment, tmp_path, monkeypatch
):
    wanted = wanted_job("index", images, tmp_path)
    late, other = (opened(wanted, equipment) for _ in range(2))

    def claim_after_the_end(path, owner):
        monkeypatch.setattr("mlcd.pipelines.shard_collection.claim", claim)
        finish(other)
        claim(path, owner)

    monkeypatch.setattr("mlcd.pipelines.shard_collection.claim", claim_after_the_end)
    late.plan()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "out"]
    assert late.make(0, nothing) == 1


def test_embeddings_come_with_the_labels_when_they_are_asked_for(archive, equipment, tmp_path):
    finish(opened(wanted_job("label", archive, tmp_path, embeddings=True), equipment))
    table = LabelTable.open(tmp_path / "out")
    rows = np.concatenate(
        [
            np.stack(pq.read_table(path)["embedding"].to_numpy())
            for path in sorted((tmp_path / "out").glob("part-*.parquet"))
        ]
    )
    assert rows.dtype == np.float32
    embed(open_source(str(archive)), equipment.encoder, tmp_path / "embeddings", SILENT)
    expected = EmbeddingsArtifact.open(tmp_path / "embeddings")
    assert expected.keys == table.keys
    assert (rows == expected.load()).all()


def test_a_shard_that_two_make_at_once_is_made_once(images, equipment, tmp_path):
    """A lease has ended and its holder does not know: each has begun before the other has written."""
    wanted = wanted_job("label", images, tmp_path)
    both = threading.Barrier(2, timeout=30)
    failures = []

    def late(shards):
        def wait_at_the_end(done, errors):
            if done == 24 and not both.broken:
                both.wait()

        try:
            shards.make(0, wait_at_the_end)
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    shards = [opened(wanted, equipment) for _ in range(2)]
    shards[0].plan()
    threads = [threading.Thread(target=late, args=(each,)) for each in shards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for shard in (1, 2):
        shards[1].make(shard, nothing)
    shards[0].publish(nothing)
    assert open_artifact(tmp_path / "out").digest == by_command(
        wanted, equipment, tmp_path / "undisturbed"
    )


def test_who_writes_after_the_end_leaves_nothing(images, equipment, tmp_path):
    wanted = wanted_job("label", images, tmp_path)
    late, other = (opened(wanted, equipment) for _ in range(2))
    late.plan()

    with pytest.raises(Conflict, match="was published or removed meanwhile"):
        late.make(0, finishing(other, tmp_path / "out"))
    assert not draft_path(tmp_path / "out").exists()
    assert sorted(path.name for path in (tmp_path / "out").glob(".*")) == []
    assert open_artifact(tmp_path / "out").digest == by_command(
        wanted, equipment, tmp_path / "undisturbed"
    )
    assert late.make(0, nothing) == 1


def test_a_draft_that_is_removed_while_a_file_is_written_is_told(tmp_path):
    with Draft(tmp_path / "out", Request("labels"), shared=True) as draft:
        with (
            pytest.raises(Conflict, match="was published or removed meanwhile"),
            draft.write("part") as path,
        ):
            path.write_text("rows")
            draft.path.rename(tmp_path / "away")
            draft.path.mkdir()  # of another job
        assert list(draft.path.iterdir()) == []


def test_what_is_stopped_leaves_no_part(images, equipment, tmp_path):
    shards = opened(wanted_job("label", images, tmp_path), equipment)
    shards.plan()

    def stop(done, errors):
        if done == 10:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        shards.make(0, stop)
    assert [
        path.name
        for path in draft_path(tmp_path / "out").iterdir()
        if not path.name.startswith(".")
    ] == []
    finish(shards)


def test_publishing_makes_what_is_missing(images, equipment, tmp_path):
    wanted = wanted_job("embed", images, tmp_path)
    shards = opened(wanted, equipment)
    shards.plan()
    shards.make(1, nothing)
    shards.publish(nothing)
    assert EmbeddingsArtifact.open(tmp_path / "out").num_rows == 59


def test_a_changed_input_is_told_and_not_labeled(images, archive, equipment, tmp_path):
    wanted = wanted_job("label", archive, tmp_path)
    shards = opened(wanted, equipment)
    shards.plan()
    content = archive.read_bytes()

    def replace_meanwhile(done, errors):
        if done == 5:
            archive.write_bytes(content[:512] + b"\0" * (len(content) - 512))

    with pytest.raises(Conflict, match=r"shard\.tar .*has changed since it was listed"):
        shards.make(0, replace_meanwhile)
    assert not list(draft_path(tmp_path / "out").glob("part-*"))
    archive.write_bytes(content)
    assert opened(wanted, equipment).make(0, nothing) == 1  # restored: the same listing
    with tarfile.open(archive, "a") as tar:
        member = tarfile.TarInfo("more.png")
        member.size = 3
        tar.addfile(member, io.BytesIO(b"???"))
    with pytest.raises(InputChanged, match="the input has changed since the work was planned"):
        opened(wanted, equipment).make(1, nothing)


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_bytes(b"another")])
def test_a_changed_file_of_a_folder_is_told(images, equipment, tmp_path, change):
    shards = opened(wanted_job("embed", images, tmp_path), equipment)
    shards.plan()
    change(images / "0" / "0000.png")
    with pytest.raises(Conflict, match=r"0/0000\.png .*has changed since it was listed"):
        shards.make(0, nothing)
    assert shards.make(1, nothing) == 0


def test_files_of_a_shard_are_shown_before_they_are_read(images, equipment, tmp_path):
    shown = []

    def refuse(files):
        shown.extend(files)
        raise ConfigInvalid("not these")

    shards = opened(wanted_job("embed", images, tmp_path), equipment, check_files=refuse)
    shards.plan()
    with pytest.raises(ConfigInvalid, match="not these"):
        shards.make(0, nothing)
    assert shown == [str(path) for path in sorted(images.rglob("*.png"))[:24]]
    assert not list(draft_path(tmp_path / "out").glob("part-*"))


def test_other_settings_are_told_from_another_input(images, equipment, tmp_path):
    wanted = wanted_job("embed", images, tmp_path)
    opened(wanted, equipment).plan()
    with pytest.raises(
        ConfigInvalid,
        match=r"was started with .*part_entries 24.*, this worker has .*part_entries 7",
    ):
        opened(wanted, equipment, part_entries=7).make(0, nothing)
    with pytest.raises(Conflict, match="contains unfinished work on other input or settings"):
        opened(wanted, equipment, owner="another", part_entries=7).plan()


def test_discarding_takes_one_s_own_unfinished_work_only(images, equipment, tmp_path):
    wanted = wanted_job("index", images, tmp_path)
    shards = opened(wanted, equipment)
    shards.plan()
    shards.make(0, nothing)
    discard(wanted, owner="another")
    assert draft_path(tmp_path / "out").exists()
    discard(wanted, owner="job")
    discard(wanted, owner="job")
    assert [path.name for path in tmp_path.iterdir()] == ["images"]
    finish(shards)
    discard(wanted, owner="job")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "out"]


def test_images_that_cannot_be_used_leave_no_draft(equipment, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"no image")
    shards = opened(wanted_job("label", tmp_path / "images", tmp_path), equipment)
    shards.plan()
    assert shards.make(0, nothing) == 1
    with pytest.raises(InvalidInput, match="none of the 1 files"):
        shards.publish(nothing)
    assert not draft_path(tmp_path / "out").exists()


@contextmanager
def files_of_at_most(num_bytes):
    """Limits the size of files, as a full disk does for any writer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("num_bytes", [0, 2000])
def test_a_full_disk_is_told_and_the_work_goes_on_later(images, equipment, tmp_path, num_bytes):
    wanted = wanted_job("embed", images, tmp_path)
    shards = opened(wanted, equipment)
    with (
        files_of_at_most(num_bytes),
        pytest.raises(DiskFull, match="the disk is full while writing"),
    ):
        shards.plan()
        shards.make(0, nothing)
    finish(shards)
    assert EmbeddingsArtifact.open(tmp_path / "out").num_rows == 59


@pytest.mark.parametrize("num_bytes", [1000, 40_000])
def test_a_full_disk_is_told_while_a_collection_is_built_and_it_goes_on_later(
    images, equipment, tmp_path, num_bytes
):
    shards = opened(wanted_job("index", images, tmp_path), equipment)
    shards.plan()
    for shard in range(3):
        shards.make(shard, nothing)
    with files_of_at_most(num_bytes), pytest.raises(DiskFull):
        shards.publish(nothing)
    assert not (tmp_path / "out").exists()
    shards.publish(nothing)
    with Collection.open(tmp_path / "out", background=False) as collection:
        assert len(collection) == 59


def test_a_command_and_a_job_do_not_write_the_same_output(images, equipment, tmp_path):
    wanted = wanted_job("embed", images, tmp_path)
    shards = opened(wanted, equipment)
    shards.plan()

    def ask_meanwhile(done, errors):
        with pytest.raises(Conflict, match="another process is writing"):
            embed(open_source(str(images)), equipment.encoder, tmp_path / "out", SILENT)

    shards.make(2, ask_meanwhile)
    assert (draft_path(tmp_path / "out") / "part-00002.npy").exists()
