"""`mlcd label` from embeddings and from images, by one process and by several, undisturbed and
killed.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.embeddings import ERRORS, EmbeddingsArtifact, part_name
from mlcd.artifacts.labels import LabelTable
from mlcd.types import unit_rows
from tests.conftest import refuse, succeed
from tests.written_artifacts import write_centers, write_embeddings

NUM_PARTS, PART_ROWS = 60, 80


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Embeddings in many small parts, and centers for them."""
    folder = tmp_path_factory.mktemp("made")
    generator = np.random.default_rng(0)
    parts = [unit_rows(generator.standard_normal((PART_ROWS, 32))) for _ in range(NUM_PARTS)]
    keys = [f"{part:03d}/{row:03d}.png" for part in range(NUM_PARTS) for row in range(PART_ROWS)]
    write_embeddings(folder / "embeddings", parts, keys)
    write_centers(folder / "centers", generator.standard_normal((4000, 32)))
    return folder


def command(made, out, *more):
    return ["label", made / "embeddings", out, "--centers", made / "centers", *more]


@pytest.fixture(scope="module")
def undisturbed(made) -> Path:
    succeed(*command(made, made / "undisturbed"))
    return made / "undisturbed"


def manifest(out):
    return json.loads((out / "manifest.json").read_text())


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "mlcd", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished_parts(out):
    return len(list(out.with_name(out.name + ".partial").glob("part-*.parquet")))


def wait_for_parts(out, num, process):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None and finished_parts(out) < num:
        time.sleep(0.001)


def descendants(pid):
    """The workers of the process, by /proc."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(status.parent.name))
    return found


def test_a_threshold_says_how_many_lists_it_cut_short(made, tmp_path):
    top, threshold = 5, 0.55
    succeed(*command(made, tmp_path / "labels", "--top", top, "--threshold", threshold))
    rows = EmbeddingsArtifact.open(made / "embeddings").load().astype(np.float64)
    above = (rows @ Centers.open(made / "centers").vectors.astype(np.float64).T >= threshold).sum(
        axis=1
    )
    assert 0 < (above > top).sum() < len(rows)
    assert manifest(tmp_path / "labels")["summary"]["truncated"] == (above > top).sum()
    lengths = (LabelTable.open(tmp_path / "labels").ids >= 0).sum(axis=1)
    assert (lengths == np.minimum(above, top)).all()


def assert_same(out, undisturbed):
    """Byte for byte, each key exactly once, every row counted."""
    assert manifest(out)["digest"] == manifest(undisturbed)["digest"]
    for path in undisturbed.glob("part-*.parquet"):
        assert (out / path.name).read_bytes() == path.read_bytes()
    keys = LabelTable.open(out).keys
    assert len(keys) == len(set(keys)) == NUM_PARTS * PART_ROWS
    scan = manifest(out)["summary"]["scan"]
    assert (
        scan["proven"] + scan["wider"] + scan["float32"] + scan["float64"] == NUM_PARTS * PART_ROWS
    )
    assert [path.name for path in out.glob(".*")] == []
    assert not out.with_name(out.name + ".partial").exists()


def kill_and_finish(made, out, undisturbed, num_kills, workers):
    """SIGKILL to the command after ever more parts, at a random moment, then a last run."""
    generator = random.Random(num_kills)
    arguments = command(made, out, "--workers", workers)
    for kill in range(num_kills):
        process = start(*arguments)
        wait_for_parts(out, kill * NUM_PARTS // (num_kills + 1), process)
        time.sleep(generator.uniform(0, 0.03))
        process.kill()
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        assert not out.exists()
    succeed(*arguments)
    assert_same(out, undisturbed)


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_twice_it_ends_with_the_same_bytes(made, undisturbed, tmp_path, workers):
    kill_and_finish(made, tmp_path / "out", undisturbed, 2, workers)


def test_a_killed_worker_is_replaced_and_its_part_made_again(made, undisturbed, tmp_path):
    out = tmp_path / "out"
    process = start(*command(made, out, "--workers", 2))
    for num_parts in (3, 20):
        wait_for_parts(out, num_parts, process)
        os.kill(descendants(process.pid)[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert_same(out, undisturbed)


def test_workers_end_with_their_parent(made, tmp_path):
    out = tmp_path / "out"
    process = start(*command(made, out, "--workers", 2))
    wait_for_parts(out, 2, process)
    workers = descendants(process.pid)
    assert len(workers) == 2
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(_runs(worker) for worker in workers):
        time.sleep(0.01)
    assert not any(_runs(worker) for worker in workers)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)]
)
def test_a_signal_to_every_process_ends_all_without_a_word_of_the_workers(
    made, undisturbed, tmp_path, number, status
):
    out = tmp_path / "out"
    process = start(*command(made, out, "--workers", 2))
    wait_for_parts(out, 2, process)
    workers = descendants(process.pid)
    deadline = time.monotonic() + 60
    for pid in (*workers, process.pid):
        os.kill(pid, number)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in output) == (status, False), output
    while any(map(_runs, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    succeed(*command(made, out, "--workers", 2))
    assert_same(out, undisturbed)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_what_a_worker_refuses_is_said_in_one_line(made, tmp_path):
    copy = tmp_path / "embeddings"
    shutil.copytree(made / "embeddings", copy)
    victim = copy / part_name(41)
    victim.write_bytes(victim.read_bytes()[:-1] + b"\1")
    arguments = ["label", copy, tmp_path / "out", "--centers", made / "centers", "--workers", 2]
    refuse(*arguments, contains=part_name(41))


@pytest.mark.parametrize(("value", "why"), [(np.nan, "holds NaN or Inf"), (0.0, "has norm 0")])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_row_that_cannot_be_labeled_is_named_by_its_number_and_key(
    made, tmp_path, value, why, workers
):
    parts = [np.load(made / "embeddings" / part_name(part)) for part in (0, 1)]
    parts[1][7] = value
    keys = EmbeddingsArtifact.open(made / "embeddings").keys[: 2 * PART_ROWS]
    write_embeddings(tmp_path / "embeddings", parts, keys)
    arguments = ["label", tmp_path / "embeddings", tmp_path / "out", "--centers", made / "centers"]
    refuse(*arguments, "--workers", workers, contains=f"row {PART_ROWS + 7} (001/007.png) {why}")


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_approximate_labels_are_audited_and_survive_a_kill(made, tmp_path, workers):
    more = ("--mode", "approximate", "--probes", 8, "--workers", workers)
    whole, out = tmp_path / "whole", tmp_path / "out"
    succeed(*command(made, whole, *more[:4]))
    process = start(*command(made, out, *more))
    wait_for_parts(out, 5, process)
    process.kill()
    process.communicate(timeout=60)
    assert not out.exists()
    succeed(*command(made, out, *more))
    assert manifest(out)["digest"] == manifest(whole)["digest"]
    assert manifest(out)["config"]["mode"] == "approximate"
    audit = manifest(out)["summary"]["audit"]
    assert audit == manifest(whole)["summary"]["audit"]
    assert 0 < audit["low"] < audit["recall"] < audit["high"] < 1
    assert (audit["probes"], audit["rows"], audit["top"]) == (8, 2000, 8)
    # What the audit says holds for all rows.
    exact = LabelTable.open(_exact(made, tmp_path)).ids
    found = LabelTable.open(out).ids
    assert (
        audit["low"] < (exact[:, :, None] == found[:, None, :]).any(axis=2).mean() < audit["high"]
    )
    refuse(*command(made, out, "--mode", "approximate"), contains="other input or settings")


def _exact(made, tmp_path):
    succeed(*command(made, tmp_path / "exact"))
    return tmp_path / "exact"


@pytest.fixture
def images(digits, tmp_path):
    folder = tmp_path / "images"
    shutil.copytree(digits, folder)
    (folder / "1" / "broken.png").write_bytes(b"no image")
    (folder / "3" / "empty.jpg").write_bytes(b"")
    return folder


def label_images(images, centers, out, *more):
    """In parts of 30 entries: what the constant says is too many for a test."""
    code = (
        "import mlcd.pipelines.label as label; from dataclasses import field;"
        "original = label.LabelOptions.__init__;"
        "label.LabelOptions.__init__ = lambda self, *a, **k: original(self, *a, **{'part_entries': 30, **k});"
        "from mlcd.cli import main; main()"
    )
    arguments = ["label", images, out, "--centers", centers, "--model", "hog", "--top", 3, *more]
    return [sys.executable, "-c", code, *map(str, arguments)]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_images_get_the_labels_of_their_embeddings(images, journey, tmp_path, workers):
    out, centers = tmp_path / "out", journey / "centers"
    done = subprocess.run(
        label_images(images, centers, out, "--workers", workers),
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for step in (
        ["embed", images, tmp_path / "embeddings", "--model", "hog"],
        ["label", tmp_path / "embeddings", tmp_path / "labels", "--centers", centers, "--top", 3],
    ):
        succeed(*step)
    direct, indirect = LabelTable.open(out), LabelTable.open(tmp_path / "labels")
    assert (direct.keys, direct.image_sha256, direct.names) == (
        indirect.keys,
        indirect.image_sha256,
        indirect.names,
    )
    assert direct.ids.tolist() == indirect.ids.tolist()
    assert (out / ERRORS).read_text() == (tmp_path / "labels" / ERRORS).read_text()
    assert {json.loads(line)["key"] for line in (out / ERRORS).read_text().splitlines()} == {
        "1/broken.png",
        "3/empty.jpg",
    }
    assert manifest(out)["summary"]["images"] == 200
    assert manifest(out)["summary"]["errors"] == 2
    assert len(list(out.glob("part-*.parquet"))) == 7
    succeed("verify", out)
    (images / "1" / "0001.png").write_bytes((images / "3" / "0003.png").read_bytes())
    refuse("verify", out, contains="0001.png")


def test_what_cannot_be_labeled_gets_one_line(images, journey, tmp_path):
    out, centers = tmp_path / "out", journey / "centers"
    (tmp_path / "rubbish").mkdir()
    (tmp_path / "rubbish" / "a.png").write_bytes(b"rubbish")
    given = (out, "--centers", centers)
    refuse("label", images, *given, contains="--model")
    refuse("label", images, *given, "--model", "pixels", contains="two models")
    refuse("label --model hog", journey / "features", *given, contains="leave out --model")
    refuse("label --engine torch", journey / "features", *given, contains="--engine")
    refuse("label --model hog", tmp_path / "rubbish", *given, contains="a.png")
    refuse("label", journey / "labels", *given, contains="holds labels, not embeddings")
    inside = (images / "out", *given[1:])
    refuse("label --model hog", images, *inside, contains="inside the images")
    features = ("label", journey / "features", *given)
    refuse(*features, "--threshold", 2, contains="must be a cosine")
    refuse(*features, "--probes", 8, contains="leave out --probes")
    refuse(*features, "--mode", "approximate", contains="approximate labels require at least")
    approximate = ("--mode", "approximate", "--model", "hog")
    refuse("label", images, *given, *approximate, contains="`mlcd embed` first")
    assert not out.exists()
    assert not out.with_name("out.partial").exists()
