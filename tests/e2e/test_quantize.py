"""`mlcd quantize` from a model to embeddings in int8: what the manifest says, what is refused, and
what a kill leaves.
"""

import hashlib
import json
import shutil
import signal
import sys

import numpy as np
import pytest
from PIL import Image

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import open_artifact
from mlcd.extras import install_command
from mlcd.keys import HELD_OUT_FRACTION, split_positions
from tests.conftest import call_mlcd, run_mlcd, run_python, succeed

_KILLED = """
import os, sys
from mlcd.pipelines import quantize
quantize.compare_rows = lambda *_: os.kill(os.getpid(), 9)
from mlcd.cli import main
sys.argv = ["mlcd", "quantize", *sys.argv[1:]]
main()
"""


def embedded(model, images, out, *options):
    succeed("embed", images, out, "--model", model, "--engine", "openvino", *options)
    return EmbeddingsArtifact.open(out)


def refused(*arguments):
    """Returns the one line of a refusal."""
    done = call_mlcd("quantize", *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done
    (line,) = done.stderr.splitlines()
    return line


def test_the_manifest_states_what_embeddings_show(int8_model, journey, digits, tmp_path):
    """The oracle: `mlcd embed` in both precisions, and the images held out by their keys."""
    model, before = open_artifact(int8_model, "model"), open_artifact(journey / "model", "model")
    exact = embedded(int8_model, digits, tmp_path / "fp32")
    found = embedded(int8_model, digits, tmp_path / "int8", "--precision", "int8")
    keys = exact.keys
    assert found.keys == keys
    splits = split_positions(keys, (key.split("/")[0] for key in keys))
    judging = splits <= HELD_OUT_FRACTION
    cosines = (exact.load() * found.load()).sum(axis=1)
    facts = model.summary
    assert facts["int8_mean_cosine"] == pytest.approx(cosines[judging].mean(), abs=1e-6)
    assert facts["int8_min_cosine"] == pytest.approx(cosines[judging].min(), abs=1e-6)
    assert facts["int8_held_out_images"] == judging.sum() == 40
    assert facts["int8_calibration_images"] == 160
    order = np.argsort(splits, kind="stable")
    calibrating = (keys[row] for row in order[~judging[order]])
    files = (hashlib.sha256((digits / key).read_bytes()).digest() for key in calibrating)
    assert facts["int8_calibration_digest"] == hashlib.sha256(b"".join(files)).hexdigest()
    labels = [
        (rows.load() @ centers_of(model).T).argmax(axis=1)[judging] for rows in (exact, found)
    ]
    assert facts["int8_same_label"] == pytest.approx((labels[0] == labels[1]).mean())
    assert facts["int8_labels"] == f"the nearest of {len(centers_of(model))} centers"
    assert facts["int8_nncf"]
    assert facts["int8_openvino"]
    assert facts["parity_min_cosine"] == before.summary["parity_min_cosine"]


def centers_of(model):
    centers = model.path / "centers"
    assert not (centers / "mean.npy").exists()
    return np.load(centers / "centers.npy")


def test_it_is_the_same_model_in_another_precision(int8_model, journey, digits, tmp_path):
    """One fingerprint, as with bf16, and the precision tells the rows apart."""
    model, before = open_artifact(int8_model, "model"), open_artifact(journey / "model", "model")
    assert model.fingerprint == before.fingerprint
    assert model.children == before.children
    assert {name: model.files[name] for name in before.files} == before.files
    assert model.files.keys() - before.files.keys() == {"int8.xml", "int8.bin"}
    assert {parent.role for parent in model.parents} == {"images", "model"}
    assert next(each for each in model.parents if each.role == "model").digest == before.digest
    rows = embedded(int8_model, digits, tmp_path / "rows")
    again = call_mlcd(
        "embed --append --precision int8", digits, tmp_path / "rows", "--model", int8_model
    )
    assert rows.artifact.config["precision"] == "fp32"
    assert again.returncode == 2
    assert "precision" in again.stderr
    given = (digits, tmp_path / "labels", "--model", int8_model)
    succeed("label --precision int8", *given, "--centers", int8_model / "centers")
    stated = open_artifact(tmp_path / "labels", "labels").config["precision"]
    assert stated.startswith("int8-")


def test_the_same_request_is_done_already_and_another_is_a_conflict(int8_model, journey, digits):
    before = (int8_model / "manifest.json").read_bytes()
    again = call_mlcd("quantize", journey / "model", digits, int8_model, "--json")
    facts = json.loads(again.stdout.splitlines()[-1])
    assert facts["digest"] == open_artifact(int8_model).digest
    assert (int8_model / "manifest.json").read_bytes() == before
    assert "other input or settings" in refused(
        journey / "model", digits, int8_model, "--num", "17"
    )


def test_a_kill_leaves_no_model_and_the_next_attempt_ends_with_the_same(
    int8_model, journey, digits, tmp_path
):
    arguments = [str(each) for each in (journey / "model", digits, tmp_path / "out")]
    killed = run_python(_KILLED, *arguments, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "out.partial").glob(".int8-*.tmp/int8.xml"))
    succeed("quantize", *arguments, run=run_mlcd)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not list((tmp_path / "out").glob(".*"))
    made, expected = open_artifact(tmp_path / "out"), open_artifact(int8_model)
    assert made.summary["int8_mean_cosine"] == pytest.approx(
        expected.summary["int8_mean_cosine"], abs=1e-4
    )
    assert made.files.keys() == expected.files.keys()


def test_a_model_that_loses_is_refused_with_its_figure_and_nothing_is_written(
    int8, quantizer, journey, tmp_path
):
    """Calibrated on black images alone, it clips all that the held-out ones show."""
    images, size = tmp_path / "images", 8
    images.mkdir()
    keys = [f"{number:03d}.png" for number in range(100)]
    noise = np.random.default_rng(0)
    for key, split in zip(keys, split_positions(keys, [None] * 100), strict=True):
        shown = noise.integers(0, 256, (size, size, 3), dtype=np.uint8)
        pixels = shown if split <= HELD_OUT_FRACTION else np.zeros_like(shown)
        Image.fromarray(pixels).save(images / key)
    done = run_mlcd("quantize", journey / "model", images, tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, ""), done
    (line,) = done.stderr.splitlines()
    assert "must be at least 0.99, got 0." in line
    assert "on 20 held-out images: nothing was written" in line
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


def test_bad_input_is_told_in_a_line(int8, quantizer, journey, digits, tmp_path, monkeypatch):
    model, out = journey / "model", tmp_path / "out"
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(model, tmp_path / "empty", out)
    assert "no-such-model" in refused(tmp_path / "no-such-model", digits, out)
    assert (
        "quantization needs an exported model, got hog: give a directory made by `mlcd export`"
        in refused("hog", digits, out)
    )
    few = tmp_path / "few"
    few.mkdir()
    for number, path in enumerate(sorted(digits.rglob("*.png"))[:40]):
        if number < 31:
            shutil.copy(path, few / path.name)
    assert "needs at least 32 images, got 31" in refused(model, few, out)
    for number in range(40):
        (few / f"no image {number}.png").write_bytes(b"no image")
    assert "images of" in (line := refused(model, few, out))
    assert "needs 16 usable images" in line
    (tmp_path / "file").touch()
    assert "file" in refused(model, digits, tmp_path / "file" / "out")
    other = refused(model, digits, out, "--centers", journey / "centers")
    assert "must be of the same model" in other
    monkeypatch.setitem(sys.modules, "nncf", None)
    assert f"which is not installed: {install_command('quantize')}" in refused(model, digits, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "few", "file"]


def test_a_cpu_without_the_instructions_makes_none(journey, digits, tmp_path, monkeypatch):
    monkeypatch.setattr("mlcd.encoders.openvino.computes_int8", lambda: False)
    line = refused(journey / "model", digits, tmp_path / "out")
    assert "VNNI or AMX" in line
    assert not list(tmp_path.iterdir())


def test_an_export_to_triton_takes_the_graph_in_fp32_and_says_so(int8_model, tmp_path):
    done = succeed("export", int8_model, tmp_path / "repository", "--format", "triton")
    assert f"the int8 graph of {int8_model} is left out" in done.stderr
    version = open_artifact(tmp_path / "repository" / "mlcd-vit" / "1", "triton")
    assert version.files["model.onnx"] == open_artifact(int8_model).files["model.onnx"]
    assert not any("int8" in name for name in version.files)
