"""Images elsewhere, by the commands: in a real S3 server, and at URLs of a real host."""

import hashlib
import io
import json
import os
import sys
import tarfile

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.errors import ConfigInvalid, InvalidInput, MlcdError, NotFound, Unavailable
from mlcd.extras import install_command
from mlcd.fetching.url_options import UrlOptions
from mlcd.images.checksums import read_checksum
from mlcd.images.sources import open_source
from tests.conftest import call_mlcd, run_mlcd, write_digits
from tests.image_host import ImageHost, ok, redirect, status
from tests.integration.hub import DATASET, running_hub
from tests.integration.s3 import SECRET, running_faults, using


@pytest.fixture
def store(moto, tmp_path):
    with using(moto, tmp_path) as store:
        yield store


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("images"), 24)


def reads(location):
    """Reads everything at a location, as commands do."""
    source = open_source(location, urls=UrlOptions())
    source.check_not_empty()
    with source.ahead(source.entries):
        return [source.read(entry) for entry in source.entries]


def refusal(location, error=MlcdError):
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(error) as raised:
        reads(location)
    message = str(raised.value)
    assert "\n" not in message
    assert SECRET not in message
    return message


def test_each_wrong_place_is_one_line_with_its_remedy(store, monkeypatch):
    files = store.filesystem()
    files.pipe_file("bucket/wrong/readme.md", b"x")
    files.pipe_file("bucket/x.tar", b"x" * 3000)
    files.pipe_file("bucket/two.txt", b"s3://bucket/x.tar\ns3://bucket/none.tar\n")
    look = "check the bucket and the name"
    for location, error, message in (
        ("s3:/bucket/x", ConfigInvalid, "write s3://, or ./s3:/bucket/x"),
        ("s3://", InvalidInput, "the URL must name a bucket, got s3://: write s3://bucket/folder"),
        ("s3://nowhere/x", NotFound, f"no images at s3://nowhere/x: {look}"),
        ("s3://bucket/none.tar", NotFound, f"no images at s3://bucket/none.tar: {look}"),
        ("s3://bucket/none/*.tar", NotFound, "no images at s3://bucket/none/*.tar"),
        (
            "s3://bucket/two.txt",
            NotFound,
            "s3://bucket/none.tar does not exist: check the bucket and the path",
        ),
        (
            "s3://bucket/wrong",
            InvalidInput,
            "s3://bucket/wrong must hold images, found none: is it the",
        ),
        ("s3://bucket/x.tar", InvalidInput, "the shard is damaged, cut short or compressed"),
        ("foo://bucket/x", InvalidInput, "foo://bucket/x cannot be read as a path or URL"),
        (
            f"s3://me:{SECRET}@bucket/x",
            ConfigInvalid,
            "s3:// URL must not contain a password: leave",
        ),
        (f"https://{SECRET}@h/x.tar", ConfigInvalid, "https:// URL must not contain a password"),
        (
            f"https://h/x.tar?X-Amz-Signature={SECRET}",
            ConfigInvalid,
            "must not contain a signature or a token",
        ),
        ("https://127.0.0.1:1/x.tar", Unavailable, "cannot be reached (ClientConnectorError): see"),
    ):
        assert message in refusal(location, error)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert install_command("gcs") in refusal("gs://bucket/x")


def test_rights_and_credentials_that_lack_are_told(store, monkeypatch):
    rights = "set the store's credentials in the environment or in a profile"
    with running_faults(store, seed=0, rate=0.0, denied=True) as denied:
        monkeypatch.setenv("AWS_ENDPOINT_URL", denied.url)
        for location in ("s3://bucket/x.tar", "s3://bucket/folder"):
            assert f"access to {location} was denied: {rights}" in refusal(location)
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
    monkeypatch.setenv("AWS_PROFILE", "absent")
    assert f"s3://bucket/x.tar requires credentials: {rights}" in refusal("s3://bucket/x.tar")
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    assert f"s3://bucket requires credentials: {rights}" in refusal("s3://bucket")


def test_a_list_of_objects_is_read_and_a_shard_compared_with_its_checksum(store, images, tmp_path):
    files, names = store.filesystem(), sorted(images.glob("*/*.png"))
    shard = tmp_path / "digits.tar"
    with tarfile.open(shard, "w") as archive:
        for path in names:
            archive.add(path, arcname=path.name)
    files.put(str(images), "bucket/listed", recursive=True)
    files.put(str(shard), "bucket/digits.tar")
    listed = tmp_path / "list.txt"
    urls = [f"s3://bucket/listed/{path.relative_to(images)}" for path in names]
    listed.write_text("\n".join(urls))
    source = open_source(str(listed), urls=UrlOptions())
    assert [entry.class_name for entry in source.entries] == [path.parent.name for path in names]
    assert reads(str(listed)) == [path.read_bytes() for path in names]
    with pytest.raises(InvalidInput, match="this command does not fetch"):
        open_source(str(listed))
    assert read_checksum(files, "bucket/digits.tar") is not None
    assert reads("s3://bucket/digits.tar") == [path.read_bytes() for path in names]


def test_no_secret_is_in_what_a_command_says_or_writes(store, images, tmp_path, monkeypatch):
    store.filesystem().put(str(images), "bucket/secret", recursive=True)
    store.filesystem().pipe_file("bucket/secret/0/broken.png", b"x")
    with running_faults(store, seed=4, rate=0.05) as faults:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faults.url)
        fsspec.filesystem("s3").clear_instance_cache()
        made = call_mlcd("embed", "s3://bucket/secret", tmp_path / "out", "--model", "pixels")
    assert (made.returncode, "1 file skipped" in made.stdout) == (0, True), made.stderr
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert all(SECRET.encode() not in data for data in written)
    assert SECRET not in made.stdout + made.stderr


def test_parquet_of_the_hub_is_read_in_its_parts(images, tmp_path):
    """In a process of its own: the hub's client reads the server's place when it is imported."""
    pytest.importorskip("huggingface_hub")
    paths = sorted(images.glob("*/*.png"))
    files = {"README.md": b"# digits"}
    for part, some in (("train", paths[:20]), ("test", paths[20:])):
        table = pa.table(
            {
                "image": [{"bytes": path.read_bytes(), "path": path.name} for path in some],
                "label": [path.parent.name for path in some],
            }
        )
        pq.write_table(table, written := io.BytesIO())
        files[f"data/{part}-00000-of-00001.parquet"] = written.getvalue()
    with running_hub(files) as url:
        made = run_mlcd(
            *("embed", f"hf://datasets/{DATASET}", tmp_path / "out", "--model", "pixels"),
            env={**os.environ, "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0"},
        )
    assert made.returncode == 0, made.stderr
    rows = EmbeddingsArtifact.open(tmp_path / "out")
    assert [digest for _, digest in rows.image_digests()] == [
        hashlib.sha256(path.read_bytes()).digest() for path in (*paths[20:], *paths[:20])
    ]
    classes = [f"test/{path.parent.name}" for path in paths[20:]]
    assert rows.class_names[: len(classes)] == classes


def test_a_column_of_urls_is_embedded_labeled_verified_and_tried_again(images, tmp_path):
    paths = sorted(images.glob("*/*.png"))
    names = [f"/{number}?key={SECRET}" for number in range(len(paths))]
    answers = {name: ok(path.read_bytes()) for name, path in zip(names, paths, strict=True)}
    with ImageHost(answers | {names[3]: status(503)}) as host:
        host.answers[names[5]] = redirect("http://169.254.169.254/")
        urls = [host.url + name for name in names]
        pq.write_table(pa.table({"link": urls}), tmp_path / "t.parquet")
        options = ["--url-column", "link", "--url-hosts", "127.0.0.1"]
        options += ["--url-networks", "127.0.0.1/32", "--url-ports", host.port]
        command = ["embed", tmp_path / "t.parquet", tmp_path / "out", "--model", "pixels", *options]
        assert "22 embeddings of 768, 2 files skipped" in call_mlcd(*command).stdout
        lines = (tmp_path / "out" / "errors.jsonl").read_text().splitlines()
        expected = [("t/00000003", "fetch-failed"), ("t/00000005", "url-refused")]
        assert [(each["key"], each["reason"]) for each in map(json.loads, lines)] == expected
        host.answers[names[3]] = answers[names[3]]
        again = call_mlcd(*command, "--append")
        assert "23 embeddings" in again.stdout, again.stderr
        assert call_mlcd("verify", tmp_path / "out").returncode == 0
        clusters = ["--clusters", 2, "--subtract-mean"]
        assert not call_mlcd(
            "cluster", tmp_path / "out", tmp_path / "centers", *clusters
        ).returncode
        arguments = ["--centers", tmp_path / "centers", "--model", "pixels", "--workers", 2]
        made = call_mlcd("label", command[1], tmp_path / "labels", *arguments, *options)
        assert "labels of 23 images among 2 centers" in made.stdout, made.stderr
        checked = call_mlcd("verify", tmp_path / "labels")
        assert (checked.returncode, "24 URLs, nothing fetched" in checked.stdout) == (0, True)
    written = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert all(SECRET.encode() not in data for data in written)
    rows = EmbeddingsArtifact.open(tmp_path / "out")
    local = call_mlcd("embed", images, tmp_path / "local", "--model", "pixels")
    assert local.returncode == 0
    kept = np.delete(EmbeddingsArtifact.open(tmp_path / "local").load(), 5, axis=0)
    assert np.array_equal(np.sort(rows.load(), axis=0), np.sort(kept, axis=0))


def test_a_column_of_urls_on_the_command_line_has_its_mistakes_told(tmp_path):
    pq.write_table(pa.table({"link": ["http://x.example/"]}), tmp_path / "t.parquet")
    embed = ["embed", tmp_path / "t.parquet", tmp_path / "out", "--model", "pixels"]
    for arguments, message in (
        ([], "t.parquet lacks an image column"),
        (["--url-column", "url"], "lacks the column url: give one of link"),
        (["--url-column", "link", "--url-hosts", "a b"], "--url-hosts a b: a host must be"),
        (["--url-column", "link", "--texts"], "--url-column cannot be combined with --texts"),
    ):
        made = call_mlcd(*embed, *arguments)
        assert made.returncode != 0
        assert message in made.stderr
    assert "--url-column require --model" in call_mlcd(
        "label", tmp_path, tmp_path / "l", "--centers", tmp_path, "--url-column", "link"
    ).stderr.replace("\n", " ")
