"""Images added later: embedded, labeled and indexed beside what is there, undisturbed and
killed.
"""

import json
import shutil
import signal

import numpy as np
import pytest

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.labels import LabelTable
from mlcd.artifacts.manifest import open_artifact
from mlcd.collections.collection import Collection
from mlcd.pipelines.cluster import ClusterOptions, rows_to_cluster
from mlcd.training.evaluation.representations import digest_rows
from mlcd.training.evaluation.seen import find_seen
from tests.conftest import refuse, run_python, succeed, write_digits

KILLED = """
import os, sys
import mlcd.{module} as module
original = module.{name}
def die(*arguments, **options):
    if {before}:
        os.kill(os.getpid(), 9)
    result = original(*arguments, **options)
    os.kill(os.getpid(), 9)
module.{name} = die
from mlcd.cli import main
main()
"""
MOMENTS = {
    "a part is made": ("pipelines.embed_more", "write_encoded", False),
    "all is in its place": ("artifacts.addition", "write_synced", True),
    "the manifest is written": ("artifacts.addition", "write_synced", False),
}


def done(*arguments):
    result = succeed(*arguments)
    return result.stdout


def embed(folder, *more):
    return ["embed", folder / "photos", folder / "embeddings", "--model", "hog", *more]


def label(folder, *more):
    return [
        "label",
        folder / "embeddings",
        folder / "labels",
        "--centers",
        folder / "centers",
        *more,
    ]


def index(folder, *more):
    return ["index", folder / "embeddings", folder / "collection", *more]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """Everything made of 60 photographs and a broken one; then 20 more, and another broken one, are
    there.
    """
    folder = tmp_path_factory.mktemp("append")
    write_digits(folder / "photos", 60)
    (folder / "photos" / "broken.png").write_bytes(b"no image")
    done(*embed(folder))
    done("cluster", folder / "embeddings", folder / "centers", "--clusters", 8)
    done(*label(folder))
    done(*index(folder))
    write_digits(folder / "photos", 80)
    (folder / "photos" / "3" / "broken.png").write_bytes(b"no image either")
    return folder


@pytest.fixture
def folder(before, tmp_path):
    shutil.copytree(before, tmp_path / "work")
    return tmp_path / "work"


def test_new_images_are_added_and_the_rest_stays_as_it_is(folder):
    old = {name: contents(folder / name) for name in ("embeddings", "labels")}
    refuse(*embed(folder), contains="--append adds what is new")
    assert "80 embeddings of 1764, 2 files skipped" in done(*embed(folder, "--append"))
    refuse(*label(folder), contains="--append adds what is new")
    assert "labels of 80 images" in done(*label(folder, "--append"))
    refuse(*index(folder), contains="--append adds rows that the embeddings have gained")
    assert "collection of 80 items" in done(*index(folder, "--append"))
    for name, files in old.items():
        now = contents(folder / name)
        assert {file: now[file] for file in files if file != "manifest.json"} == {
            file: content for file, content in files.items() if file != "manifest.json"
        }
    embeddings = EmbeddingsArtifact.open(folder / "embeddings")
    errors = [json.loads(line)["key"] for line in embeddings.errors_file.read_text().splitlines()]
    assert sorted(errors) == ["3/broken.png", "broken.png"]
    assert embeddings.artifact.summary["added"] == 20
    assert len(set(embeddings.keys)) == 80
    done("verify", folder)
    # Again, with or without the flag, there is nothing to do; as it would be for who had made it at
    # once.
    digests = {name: open_artifact(folder / name).digest for name in old}
    for command in (embed, label):
        done(*command(folder, "--append"))
        done(*command(folder))
    assert digests == {name: open_artifact(folder / name).digest for name in old}


def test_a_run_knows_what_its_centers_were_made_from_after_images_were_added(folder):
    """The rows that were clustered are those of then; the split of the images is taken anew, and
    that is said.
    """
    run = folder / "run"
    data = (f"data.images={folder / 'photos'}", f"data.labels={folder / 'labels'}")
    short = (
        "schedule.steps=1",
        "optim.warmup_steps=0",
        "schedule.batch_size=8",
        "checkpoint.every_steps=1",
    )
    done("train", "demo-digits", *data, *short, f"out={run}")
    clustered = ClusterOptions(num_clusters=8)
    rows = rows_to_cluster(EmbeddingsArtifact.open(folder / "embeddings"), clustered)
    done(*embed(folder, "--append"))
    done(*label(folder, "--append"))
    seen = find_seen(open_artifact(run / "checkpoints" / "step_000001"))
    grown = EmbeddingsArtifact.open(folder / "embeddings")
    np.testing.assert_array_equal(seen.clustered, digest_rows(grown.image_sha256)[rows])
    (unknown,) = seen.unknown
    assert "labels has changed since the run started" in unknown


def test_the_rows_and_labels_are_those_of_one_run_over_all(folder, tmp_path):
    done(*embed(folder, "--append"))
    done(*label(folder, "--append"))
    grown, labels = (
        EmbeddingsArtifact.open(folder / "embeddings"),
        LabelTable.open(folder / "labels"),
    )
    shutil.move(folder / "embeddings", tmp_path / "grown")
    shutil.move(folder / "labels", tmp_path / "more")
    done(*embed(folder))
    shutil.move(folder / "embeddings", tmp_path / "whole")
    done("label", tmp_path / "whole", folder / "labels", "--centers", folder / "centers")
    grown, whole = (
        EmbeddingsArtifact.open(tmp_path / "grown"),
        EmbeddingsArtifact.open(tmp_path / "whole"),
    )
    places = [grown.keys.index(key) for key in whole.keys]
    np.testing.assert_array_equal(grown.load()[places], whole.load())
    labels, again = LabelTable.open(tmp_path / "more"), LabelTable.open(folder / "labels")
    np.testing.assert_array_equal(
        labels.ids[[labels.keys.index(key) for key in again.keys]], again.ids
    )
    scans = [table.artifact.summary["scan"] for table in (labels, again)]
    assert [sum(n for name, n in scan.items() if name != "products") for scan in scans] == [80, 80]


def test_labels_of_images_get_those_of_new_images(folder):
    """The source gains 20 images after the first labels; the labels end as those of one run."""
    photos, centers = folder / "photos", folder / "centers"
    shutil.move(photos / "3" / "broken.png", folder / "later.png")
    new = [path for path in sorted(photos.rglob("*.png")) if "0060" <= path.stem < "a"]
    for path in new:
        path.rename(folder / f"{path.parent.name}-{path.name}")
    direct = ["label", photos, folder / "direct", "--centers", centers, "--model", "hog"]
    assert f"labels of {80 - len(new)} images" in done(*direct)
    old = contents(folder / "direct")
    for path in new:
        (folder / f"{path.parent.name}-{path.name}").rename(path)
    shutil.move(folder / "later.png", photos / "3" / "broken.png")
    assert "labels of 80 images" in done(*direct, "--append")
    now = contents(folder / "direct")
    assert all(now[name] == old[name] for name in old if name != "manifest.json")
    done("verify", folder / "direct")
    grown = LabelTable.open(folder / "direct")
    done("label", photos, folder / "whole", "--centers", centers, "--model", "hog")
    whole = LabelTable.open(folder / "whole")
    rows = [grown.keys.index(key) for key in whole.keys]
    np.testing.assert_array_equal(grown.ids[rows], whole.ids)
    np.testing.assert_array_equal(grown.scores[rows], whole.scores)
    assert grown.artifact.summary["errors"] == whole.artifact.summary["errors"] == 2
    digest = grown.artifact.digest
    done(*direct, "--append")
    assert open_artifact(folder / "direct").digest == digest
    refuse(*direct, "--append", "--top", 3, contains="made from other input or settings")


def test_a_repaired_image_is_added_and_what_stays_broken_changes_nothing(folder):
    done(*embed(folder, "--append"))
    digest = open_artifact(folder / "embeddings").digest
    done(*embed(folder, "--append"))
    assert open_artifact(folder / "embeddings").digest == digest
    shutil.copy(folder / "photos" / "0" / "0000.png", folder / "photos" / "broken.png")
    assert "81 embeddings of 1764, 1 file skipped" in done(*embed(folder, "--append"))
    done("verify", folder)  # the labels are of the state before the last two additions


def test_only_new_items_are_indexed(folder):
    with Collection.open(folder / "collection", background=False) as collection:
        collection.delete("0/0000.png")
    done(*embed(folder, "--append"))
    assert "collection of 79 items" in done(*index(folder, "--append"))
    assert "collection of 79 items" in done(*index(folder, "--append"))
    done("verify", folder / "collection")


def test_what_does_not_belong_is_not_added(folder, tmp_path):
    shutil.copytree(folder / "photos", tmp_path / "elsewhere")
    command = ["embed", tmp_path / "elsewhere", folder / "embeddings", "--append", "--model"]
    refuse(*command, "hog", contains="extended with images at ../photos")
    refuse(*command, "pixels", contains="was made with another model")
    refuse(*label(folder, "--append", "--top", 3), contains="made from other input or settings")
    refuse(*label(folder, "--append", "--mode", "approximate"), contains="audited as a whole")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("command", [embed, label])
def test_killed_at_any_moment_there_is_the_old_state_or_the_new(folder, tmp_path, command, moment):
    module, name, is_before = MOMENTS[moment]
    if command is label:
        if name == "write_encoded":
            pytest.skip("of embeddings")
        done(*embed(folder, "--append"))
    place = folder / ("embeddings" if command is embed else "labels")
    old = open_artifact(place).digest
    shutil.copytree(folder, tmp_path / "undisturbed")
    done(*command(tmp_path / "undisturbed", "--append"))
    new = open_artifact(tmp_path / "undisturbed" / place.name).digest
    code = KILLED.format(module=module, name=name, before=is_before)
    killed = run_python(code, *map(str, command(folder, "--append")), check=False)
    assert killed.returncode == -signal.SIGKILL
    assert open_artifact(place).digest == (new if moment == "the manifest is written" else old)
    done("verify", folder)
    write_digits(folder / "photos", 80)
    done(*command(folder, "--append"))
    assert open_artifact(place).digest == new
    done("verify", folder)


def test_what_was_begun_with_fewer_images_is_begun_anew(folder):
    code = KILLED.format(module="pipelines.embed_more", name="write_encoded", before=False)
    killed = run_python(code, *map(str, embed(folder, "--append")), check=False)
    assert killed.returncode == -signal.SIGKILL
    write_digits(folder / "photos", 90)
    assert "90 embeddings" in done(*embed(folder, "--append"))
    assert not (folder / "embeddings.partial").exists()
    done("verify", folder)
