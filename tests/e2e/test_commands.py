"""The public commands as a user types them: what they make, and what bad input gets."""

import json
import os
import shutil
import subprocess
import sys
import tarfile

import pytest

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from tests.conftest import call_mlcd, refuse, run_mlcd, succeed


@pytest.fixture
def mixed(digits, tmp_path):
    """Good digits beside everything that can be wrong with a file."""
    folder = tmp_path / "images"
    shutil.copytree(digits / "0", folder / "0")
    shutil.copytree(digits / "1", folder / "1")
    (folder / "0" / "broken.png").write_bytes(next((digits / "0").iterdir()).read_bytes()[:50])
    (folder / "1" / "empty.jpg").write_bytes(b"")
    (folder / "1" / "drawing.svg").write_text("<svg/>")
    (folder / "1" / "notes.txt").write_text("not an image, and not meant to be one")
    (folder / "dangling.png").symlink_to("nowhere.png")
    return folder


def test_broken_files_are_skipped_counted_and_listed(mixed, tmp_path):
    num_good = len(list(mixed.rglob("0*.png")))
    result = succeed("embed", mixed, tmp_path / "out", "--model", "hog")
    assert "3 files skipped" in result.stdout or "4 files skipped" in result.stdout
    errors = [
        json.loads(line) for line in (tmp_path / "out" / "errors.jsonl").read_text().splitlines()
    ]
    reasons = {error["key"]: error["reason"] for error in errors}
    assert reasons["0/broken.png"] == "undecodable"
    assert reasons["1/empty.jpg"] == "empty"
    assert reasons["1/drawing.svg"] == "unsupported-format"
    assert "1/notes.txt" not in reasons
    assert EmbeddingsArtifact.open(tmp_path / "out").num_rows == num_good


def test_a_folder_and_its_tar_give_the_same_embeddings(digits, tmp_path):
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        for path in sorted(digits.rglob("*.png")):
            archive.add(path, path.relative_to(digits).as_posix())
    succeed("embed", digits, tmp_path / "a", "--model", "hog")
    succeed("embed", tmp_path / "shard.tar", tmp_path / "b", "--model", "hog")
    folder, shard = (EmbeddingsArtifact.open(tmp_path / name) for name in "ab")
    assert folder.load().tobytes() == shard.load().tobytes()
    assert [f"shard/{key.removesuffix('.png')}" for key in folder.keys] == shard.keys


def test_the_journey_made_every_artifact(journey):
    kinds = {}
    for manifest in journey.glob("*/manifest.json"):
        kinds[manifest.parent.name] = json.loads(manifest.read_text())["kind"]
    assert kinds == {
        "features": "embeddings",
        "pixels": "embeddings",
        "centers": "centers",
        "labels": "labels",
        "run": "run",
        "knn": "evaluation",
        "clusters": "evaluation",
        "model": "model",
        "embeddings": "embeddings",
    }
    assert (journey / "collections" / "demo" / "items.sqlite").is_file()
    assert (journey / "triton" / "mlcd-vit" / "1" / "manifest.json").is_file()
    assert list(journey.glob("*.partial")) == []


def test_the_trained_model_beats_the_untrained_on_what_it_never_saw(
    journey, digits, tiny_recipe, tmp_path
):
    places = [
        f"data.images={digits}",
        f"data.labels={journey / 'labels'}",
        f"out={tmp_path / 'run'}",
    ]
    # Of five seeds, untrained towers reach 0.75 to 0.875 on these 40 images and trained ones 0.925
    # to 0.975; this one begins at 0.775.
    succeed("train", tiny_recipe, *places, "seed=1", "schedule.steps=300", "optim.lr=3e-3")
    checkpoints = tmp_path / "run" / "checkpoints"
    result = call_mlcd(
        "evaluate knn --json", checkpoints / "step_000000", checkpoints / "step_000300"
    )
    untrained, last = json.loads(result.stdout.splitlines()[-1])["results"]
    protocol = {
        "kind": "knn",
        "features": "embedding",
        "metric": "accuracy",
        "hold_out": 0.2,
        "neighbors": 5,
    }
    assert untrained["protocol"].items() >= {**protocol, "images": 200, "classes": 10}.items()
    assert untrained["protocol"]["split"] == last["protocol"]["split"]
    assert untrained["metrics"]["test_images"] == 40
    assert last["metrics"]["knn_accuracy"] > untrained["metrics"]["knn_accuracy"] + 0.1


def test_the_exported_graph_holds_no_trace_of_the_machine(journey):
    content = (journey / "model" / "model.onnx").read_bytes()
    assert b"/mlcd/models" not in content
    assert os.fsencode(sys.prefix) not in content


def test_verify_passes_and_names_the_file_of_a_flipped_byte(journey, digits, tmp_path):
    succeed("verify", journey)
    copy = tmp_path / "copy"
    shutil.copytree(journey, copy)
    # of an SQLite file some bytes belong to nothing: its pages are not full
    rows = {
        "collections": EmbeddingsArtifact.open(journey / "embeddings").load()[0].tobytes(),
        "features-state": EmbeddingsArtifact.open(journey / "features").load()[0].tobytes(),
    }
    for path in sorted(copy.rglob("*")):
        if not path.is_file() or path.name == "lock":  # locked rather than read
            continue
        original = path.read_bytes()
        damaged = bytearray(original or b"x")
        stored = {
            "items.sqlite": rows.get(path.relative_to(copy).parts[0]),
            "thumbnails.sqlite": b"WEBPVP8",
        }
        known = stored.get(path.name)
        damaged[len(damaged) // 2 if known is None else original.index(known)] ^= 1
        path.write_bytes(damaged)
        from mlcd.errors import ArtifactInvalid
        from mlcd.pipelines.verify import verify

        with pytest.raises(ArtifactInvalid, match=path.name):
            list(verify(copy))
        path.write_bytes(original)
    refuse("verify", digits, contains="must contain an artifact")


def test_json_lines_are_for_machines(digits, tmp_path):
    result = run_mlcd("embed", digits, tmp_path / "out", "--model", "hog", "--json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines[0] == {"stage": "embed", "done": 0, "total": 200}
    assert lines[-1]["images"] == 200
    assert lines[-1]["digest"]


@pytest.mark.parametrize("group", [(), ("clusters",), ("evaluate",), ("jobs",), ("keys",)])
def test_a_group_alone_prints_its_help(group):
    asked = succeed(*group)
    assert asked.stdout.startswith(f"Usage: {' '.join(('mlcd', *group))} [OPTIONS]")
    assert asked.stdout.splitlines() == call_mlcd(*group, "--help").stdout.splitlines()
    assert not asked.stderr


def test_bad_usage_and_bad_input_get_one_line(journey, digits, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "empty").mkdir()
    (tmp_path / "rubbish").mkdir()
    (tmp_path / "rubbish" / "a.png").write_bytes(b"rubbish")
    (tmp_path / "file").write_text("in the way")
    features = journey / "features"
    refuse("embed", tmp_path / "empty", out, "--model", "hog", contains="must hold images")
    refuse("embed", tmp_path / "absent", out, "--model", "hog", contains="no images")
    refuse("embed", tmp_path / "rubbish", out, "--model", "hog", contains="a.png")
    refuse("embed", digits, out, contains="--model is required: give --model starter")
    refuse(
        "embed",
        digits,
        out,
        "--model",
        "resnet",
        contains="the model resnet does not exist: give starter",
    )
    below = tmp_path / "file" / "out"
    refuse("embed --model hog", digits, below, contains="cannot be created as a directory")
    refuse("embed", digits, "/proc/out", "--model", "hog", contains="/proc/out")
    refuse("cluster", features, out, "--clusters", 500, contains="at most 160 clusters")
    refuse("cluster", features, out, "--clusters", 0, contains="--clusters")
    refuse("cluster --clusters 2", journey / "labels", out, contains="holds labels, not embeddings")
    centers = ("--centers", journey / "centers")
    refuse("label", journey / "pixels", out, *centers, contains="two models")
    refuse("train", "demo-digits", contains="not set")
    refuse("train", contains="--resume RUN")
    refuse("train", "--resume", tmp_path / "empty", contains="is not a run")
    (tmp_path / "broken").mkdir()
    for content in (b"a: [1", b"", b"\xff\xfe"):
        (tmp_path / "broken" / "config.yaml").write_bytes(content)
        refuse("train", "--resume", tmp_path / "broken", contains="config.yaml cannot be read")
    places = [f"data.images={digits}", f"data.labels={journey / 'labels'}", f"out={digits / 'run'}"]
    refuse("train", "demo-digits", *places, contains="lies inside the images")
    refuse("export", features, out, contains="must hold weights")
    refuse("evaluate", "knn", tmp_path / "absent", contains="absent does not exist")
    refuse("index", tmp_path / "absent", out, contains="not a finished artifact")
    refuse("nonsense", contains="nonsense")
    # Its steps are processes, which write to its standard error themselves.
    demo = ("--images", tmp_path / "empty", "--out", out)
    refuse("demo --features hog", *demo, contains="must hold images", run=run_mlcd)
    assert not out.exists()
    assert not out.with_name("out.partial").exists()


@pytest.mark.parametrize(
    ("command", "out"),
    [
        (["index", "features", "OUT"], "s3://bucket/made"),
        (["train", "smoke", "data.images=i", "data.labels=labels", "out=OUT"], "s3://bucket/made"),
        (["demo", "--no-serve", "--out", "OUT"], "s3://bucket/made"),
        (["embed", "images", "OUT", "--model", "hog"], "https://images.example/made"),
        (["cluster", "features", "OUT", "--clusters", 4], "https://images.example/made"),
        (["label", "features", "OUT", "--centers", "centers"], "https://images.example/made"),
        (["export", "run", "OUT"], "https://images.example/made"),
        (["evaluate", "knn", "run", "--out", "OUT"], "https://images.example/made"),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_what_cannot_be_at_a_url_is_not_made_there(command, out, tmp_path, monkeypatch):
    """`s3:` would be a folder here, which nobody looks into."""
    monkeypatch.chdir(tmp_path)
    refuse(*(str(word).replace("OUT", out) for word in command), contains=out)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_and_the_same_command_goes_on_later(digits, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", disk],
            check=False,
            capture_output=True,
        ).returncode
    ):
        pytest.skip("a small file system needs the right to mount one")
    try:
        refuse("embed", digits, disk / "out", "--model", "hog", contains="the disk is full")
        assert not (disk / "out").exists()
        subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
        succeed("embed", digits, disk / "out", "--model", "hog")
    finally:
        subprocess.run(["umount", disk], check=True)


def test_an_output_that_may_not_be_written_is_said(digits, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    refuse("embed", digits, tmp_path / "out", "--model", "hog", contains="no permission")


@pytest.mark.parametrize("name", ["photos #1", "2024", "[a", "'x", "null"])
def test_a_folder_of_any_name_goes_through_the_whole_journey(
    digits, tiny_recipe, tmp_path, monkeypatch, name
):
    """Paths are not YAML."""
    monkeypatch.chdir(tmp_path)
    for digit in "01":
        shutil.copytree(digits / digit, tmp_path / name / digit)
    recipe = tmp_path / "short.yaml"
    recipe.write_text(
        tiny_recipe.read_text()
        .replace("steps: 30", "steps: 2")
        .replace("warmup_steps: 5", "warmup_steps: 2")
    )
    labels = tmp_path / "labels"
    for command in (
        ["embed", name, "features", "--model", "pixels"],
        ["cluster", "features", "centers", "--clusters", 4],
        ["label", "features", "labels", "--centers", "centers", "--top", 2],
        ["train", recipe, f"data.images={name}", "data.labels=labels", "out=run"],
    ):
        succeed(*command)
    assert labels.is_dir()


def test_small_or_uniform_folders_get_one_line(digits, tmp_path):
    few, same = tmp_path / "few", tmp_path / "same"
    few.mkdir()
    same.mkdir()
    for number, path in enumerate(sorted((digits / "0").iterdir())[:5]):
        shutil.copy(path, few / f"{number}.png")
    for number in range(40):
        shutil.copy(path, same / f"{number}.png")
    for images in (few, same):
        # The starter's export, the first time, tells of itself.
        place = ("--images", images, "--out", tmp_path / f"demo-{images.name}")
        told = "different images that are not held out"
        refuse("demo --no-serve --features hog", *place, contains=told, run=run_mlcd)
    refuse("embed", few, few / "out", "--model", "hog", contains="inside the images")
    refuse(
        "evaluate",
        "knn",
        tmp_path / "demo-few" / "features",
        "--images",
        few,
        contains="got embeddings",
    )
