"""Images and artifacts in an object store: a real S3 server, one with faults, and processes that are killed."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import fsspec
import numpy as np
import pytest

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import Request, open_artifact
from mlcd.errors import (
    ArtifactInvalid,
    ConfigInvalid,
    Conflict,
    InvalidInput,
    NotFound,
    Unavailable,
)
from mlcd.images.sources import open_source
from mlcd.pipelines.sync import sync
from mlcd.progress import Reporter
from tests.conftest import call_mlcd, write_digits
from tests.integration.s3 import SECRET, running_faults, using

SILENT = Reporter("silent")
LARGE = 20 << 20  # more than one part of an upload


@pytest.fixture
def used(moto, tmp_path):
    with using(moto, tmp_path):
        yield moto


def make(path, *, seed=0, child=True, large=0):
    """An artifact with another inside it, a large file and one beside that no manifest lists."""
    random_bytes = np.random.default_rng(seed).bytes
    if child:
        make(path.parent / "child", seed=seed + 1, child=False)
    with Draft(path, Request("tests", {"seed": seed})) as draft:
        for number in range(5):
            with draft.write(f"part-{number}") as part:
                part.write_bytes(random_bytes(1000 + number))
        if large:
            with draft.write("large") as part:
                part.write_bytes(random_bytes(large))
        if child:
            draft.adopt("child", path.parent / "child")
        draft.publish()
    (path / "given.json").write_text('{"3": "猫"}')
    return path


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made") / "artifact", large=LARGE)


def contents(path):
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and not file.name.startswith(".")
    }


def test_an_artifact_goes_there_and_back_byte_for_byte(used, artifact, tmp_path):
    sent = sync(artifact, "s3://bucket/there/and", SILENT)
    assert (sent.copied, sent.files) == (len(contents(artifact)) - 1, len(contents(artifact)))
    again = sync(artifact, "s3://bucket/there/and/", SILENT)
    assert (again.copied, again.digest) == (0, sent.digest)
    for target in (tmp_path / "a" / "back", tmp_path / "b"):
        sync("s3://bucket/there/and", target, SILENT)
        assert contents(target) == contents(artifact)
        assert open_artifact(target).digest == sent.digest
        assert [path.name for path in target.parent.glob("*.partial")] == []
    assert sync(f"file://{tmp_path}/b", "s3://bucket/there/and", SILENT).copied == 0


def test_a_store_with_faults_gives_the_same_bytes(used, artifact, tmp_path, monkeypatch):
    with running_faults(used, seed=3, rate=0.05) as faults:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faults.url)
        fsspec.filesystem("s3").clear_instance_cache()
        for _ in range(20):  # s3fs asks again itself; a command that gives up is run again
            with contextlib.suppress(Unavailable):
                sync(artifact, "s3://bucket/faults", SILENT)
                sync("s3://bucket/faults", tmp_path / "back", SILENT)
                break
        assert faults.injected > 0
    assert contents(tmp_path / "back") == contents(artifact)


@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_images_of_a_store_with_faults_make_the_same_embeddings(used, kind, tmp_path, monkeypatch):
    images = write_digits(tmp_path / "digits", 30)
    if kind == "shards":
        (tmp_path / "shards").mkdir()
        for shard in range(3):
            with tarfile.open(tmp_path / "shards" / f"{shard}.tar", "w") as tar:
                for path in sorted(images.glob("*/*.png"))[shard * 10 : (shard + 1) * 10]:
                    tar.add(path, arcname=path.name)
        images = tmp_path / "shards"
    used.filesystem().put(str(images), f"bucket/{kind}", recursive=True)
    with running_faults(used, seed=1, rate=0.05) as faults:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faults.url)
        fsspec.filesystem("s3").clear_instance_cache()
        for source, out in ((images, "here"), (f"s3://bucket/{kind}", "there")):
            made = call_mlcd("embed", source, tmp_path / out, "--model", "pixels")
            assert (made.returncode, "0 files skipped" in made.stdout) == (0, True), made.stderr
        assert faults.injected > 0
    here, there = (EmbeddingsArtifact.open(tmp_path / out) for out in ("here", "there"))
    assert here.keys == there.keys
    assert np.array_equal(here.load(), there.load())


def test_killed_anywhere_nothing_half_is_readable_and_no_upload_is_left(used, artifact, tmp_path):
    command = [sys.executable, "-m", "mlcd", "sync", str(artifact), "s3://bucket/killed"]
    chance, files = random.Random(5), used.filesystem()
    with running_faults(used, seed=0, rate=0.0, delay_s=0.05) as slow:
        for _ in range(3):
            before = slow.requests
            process = subprocess.Popen(
                command, env={**used.environment, "AWS_ENDPOINT_URL": slow.url}
            )
            until = before + chance.randint(2, 18)
            while process.poll() is None and slow.requests < until:
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)
            process.wait()
            if not files.exists("bucket/killed/manifest.json"):
                with pytest.raises(NotFound, match="must contain a finished artifact"):
                    sync("s3://bucket/killed", tmp_path / "half", SILENT)
    sync(artifact, "s3://bucket/killed", SILENT)
    # Another test's faults may have kept an answer back: the upload that it named is nobody's.
    begun = files.call_s3("list_multipart_uploads", Bucket="bucket", Prefix="killed/")
    assert begun.get("Uploads", []) == []
    sync("s3://bucket/killed", tmp_path / "whole", SILENT)
    assert contents(tmp_path / "whole") == contents(artifact)


def test_what_is_damaged_or_something_else_is_told(used, artifact, tmp_path):
    other = make(tmp_path / "other", seed=7)
    sync(other, "s3://bucket/other/one", SILENT)
    files = used.filesystem()
    with pytest.raises(Conflict, match="contains another artifact, with digest"):
        sync(artifact, "s3://bucket/other/one", SILENT)
    with pytest.raises(Conflict, match=r"contains other files, such as one/child/"):
        sync(artifact, "s3://bucket/other", SILENT)
    files.pipe_file("bucket/other/one/part-3", b"x" * 1003)
    with pytest.raises(ArtifactInvalid, match=r"one/part-3 differs from its manifest"):
        sync(other, "s3://bucket/other/one", SILENT)
    with pytest.raises(ArtifactInvalid, match=r"one/part-3 differs from its manifest"):
        sync("s3://bucket/other/one", tmp_path / "back", SILENT)
    assert not (tmp_path / "back").exists()
    files.rm_file("bucket/other/one/part-3")
    with pytest.raises(ArtifactInvalid, match=r"one/part-3 is missing"):
        sync("s3://bucket/other/one", tmp_path / "back2", SILENT)
    assert sync(other, "s3://bucket/other/one", SILENT).copied == 1
    (other / "given.json").write_text("{}")
    with pytest.raises(Conflict, match=r"given\.json differs from .*: remove the outdated file"):
        sync(other, "s3://bucket/other/one", SILENT)
    (tmp_path / "taken").mkdir()
    with pytest.raises(Conflict, match="must be new or an artifact"):
        sync(artifact, tmp_path / "taken", SILENT)
    (tmp_path / "draft.partial").mkdir()
    (tmp_path / "draft.partial" / "theirs").touch()
    with pytest.raises(Conflict, match="must be empty or an unfinished copy"):
        sync(artifact, tmp_path / "draft", SILENT)


def test_places_that_cannot_be_reached_are_told(used, artifact, tmp_path, monkeypatch):
    for source, target, error, message in (
        (artifact, "s3://nowhere/x", NotFound, "s3://nowhere/x does not exist"),
        ("s3://nowhere/x", tmp_path / "x", NotFound, "s3://nowhere/x does not exist"),
        (
            "s3://bucket/nothing",
            tmp_path / "x",
            NotFound,
            "s3://bucket/nothing must contain a finished artifact",
        ),
        ("s3:/bucket/x", tmp_path / "x", ConfigInvalid, "neither a path nor a URL: write s3://"),
        (artifact, "foo://bucket/x", ConfigInvalid, "URL of a supported store, got foo://bucket/x"),
        (artifact, "", ConfigInvalid, "a location is empty"),
        (artifact, artifact / "copy", InvalidInput, "copy is inside"),
        ("s3://bucket/x", "s3://bucket/x", InvalidInput, "x is inside"),
        (artifact, f"s3://me:{SECRET}@bucket/x", ConfigInvalid, "must not contain a password"),
    ):
        with pytest.raises(error, match=message) as raised:
            sync(source, target, SILENT)
        assert SECRET not in str(raised.value)
    with running_faults(used, seed=0, rate=0.0, denied=True) as denied:
        monkeypatch.setenv("AWS_ENDPOINT_URL", denied.url)
        fsspec.filesystem("s3").clear_instance_cache()
        with pytest.raises(InvalidInput, match="was denied: set the store's credentials"):
            sync(artifact, "s3://bucket/x", SILENT)


def test_the_command_says_what_it_did_and_no_secret_anywhere(used, artifact, tmp_path):
    done = call_mlcd("sync", "--json", artifact, "s3://bucket/told")
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["finished"], told["files"]) == ("s3://bucket/told", len(contents(artifact)))
    shutil.rmtree(tmp_path, ignore_errors=True)
    assert SECRET not in done.stdout + done.stderr
    files = used.filesystem()
    assert all(SECRET.encode() not in files.cat_file(name) for name in files.find("bucket/told"))
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == SECRET


# Keys are texts: what is a step between folders of a disk is a part of a name here.
ODD_KEYS = (
    "a/2.png", "a//b/4.png", "a/b/4.png", "a///c.png", "/lead.png", "./dot.png", "../up.png",
    "a/../2.png", "e f/ü ñ.png", "p%20q.png", "p q.png", "h#1.png", "q?1.png", "s*t.png", "[z].png",
    "b\\c.png", "e\u0301.png", "\u00e9.png", "as-a-folder", "as-a-folder/5.png",
)  # fmt: skip


def test_every_key_is_listed_and_read_as_itself_or_counted(used):
    files = used.filesystem()
    files.mkdir("odd")

    def put(key, body):
        files.call_s3("put_object", Bucket="odd", Key=key, Body=body)

    for number, key in enumerate(ODD_KEYS):
        put(f"ph/{key}", b"body %d" % number)
    put("ph/empty/", b"")
    put("ph/full/", b"not empty")
    put("ph-beside/1.png", b"of another folder")
    put("/top.png", b"top")
    source = open_source("s3://odd/ph")
    found = {entry.key: source.read(entry) for entry in source.entries}
    assert found == {key: b"body %d" % number for number, key in enumerate(ODD_KEYS)}
    assert [problem.key for problem in source.problems] == ["full/"]
    classes = dict(zip(source.entries.keys(), source.entries.class_names(), strict=True))
    assert (classes["a//b/4.png"], classes["a/b/4.png"]) == ("a//b", "a/b")
    assert (classes["/lead.png"], classes["[z].png"]) == (None, None)
    assert not list(source.find_changed_files(list(source.entries)))
    whole = open_source("s3://odd")
    assert {entry.key: whole.read(entry) for entry in whole.entries}["/top.png"] == b"top"
    assert len(whole.entries) == len(ODD_KEYS) + 2
