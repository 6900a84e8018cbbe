"""Artifacts in object stores: the commands read and write them there, on two servers, through
faults, kills and refusals.
"""

import random
import shutil
import signal
import subprocess
import sys
import time

import fsspec
import pytest

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import MANIFEST, Request
from mlcd.errors import Conflict
from mlcd.locations import artifact_path
from mlcd.pipelines.verify_at_url import verify_at_url
from tests.conftest import call_mlcd, write_digits
from tests.integration.s3 import (
    SECRET,
    check_alike,
    running_faults,
    running_s3rver,
    using,
)

MODEL = ("--model", "pixels")


@pytest.fixture(scope="module")
def s3rver(tmp_path_factory):
    with running_s3rver(tmp_path_factory.mktemp("s3rver")) as store:
        yield store


@pytest.fixture
def used(moto, tmp_path):
    with using(moto, tmp_path) as store:
        yield store


@pytest.fixture(params=["moto", pytest.param("s3rver", marks=pytest.mark.slow)])
def each(request, tmp_path):
    with using(request.getfixturevalue(request.param), tmp_path) as store:
        yield store


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("images") / "digits", 60)


def behind(server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    fsspec.filesystem("s3").clear_instance_cache()


def elsewhere(monkeypatch, tmp_path, name):
    """Becomes another machine, which has no copy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))


def done(*arguments):
    made = call_mlcd(*arguments)
    assert made.returncode == 0, made.stderr
    assert SECRET not in made.stdout + made.stderr
    return made.stdout


def refused(*arguments):
    made = call_mlcd(*arguments)
    assert (made.returncode, made.stderr.count("\n"), made.stdout) == (2, 1, "")
    assert SECRET not in made.stderr
    return made.stderr


def commands(images, place):
    """The same work at any place."""
    yield "embed", images, f"{place}/features", *MODEL
    yield "cluster", f"{place}/features", f"{place}/centers", "--clusters", 4, "--report"
    yield "label", f"{place}/features", f"{place}/labels", "--centers", f"{place}/centers"
    yield "label", images, f"{place}/classes", "--classes"
    yield "curate", f"{place}/features", f"{place}/curated", "--duplicates", 0.99
    yield "clusters", "merge", f"{place}/centers", 0, 1, f"{place}/merged"


MADE = ("features", "centers", "labels", "classes", "curated", "merged")


@pytest.fixture(scope="module")
def here(images, tmp_path_factory):
    folder = tmp_path_factory.mktemp("here")
    for command in commands(images, folder):
        done(*command)
    return folder


def test_the_commands_make_the_same_bytes_through_faults(each, here, images, tmp_path, monkeypatch):
    with running_faults(each, seed=2, rate=0.015) as faults:
        behind(faults, monkeypatch)
        for number, command in enumerate(commands(images, "s3://bucket/made")):
            elsewhere(monkeypatch, tmp_path, f"machine-{number % 2}")
            for _ in range(20):  # a command that gives up is run again
                made = call_mlcd(*command)
                if made.returncode == 0:
                    break
                assert "cannot be reached" in made.stderr, made.stderr
            assert "s3://bucket/made/" in made.stdout
            assert str(tmp_path / "machine") not in made.stdout
            assert SECRET not in made.stdout + made.stderr
        assert done(*command) == made.stdout  # it is there
        told = done("verify", "s3://bucket/made/labels")
        assert faults.injected > 0
    for name in MADE:
        check_alike(each, f"made/{name}", here / name)
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert kept
    assert all(SECRET.encode() not in path.read_bytes() for path in kept)
    checked = [line.split()[2] for line in told.splitlines() if line.startswith("ok")]
    assert checked == [f"s3://bucket/made/{name}:" for name in ("labels", "features", "centers")]


def test_what_is_added_and_named_elsewhere_is_there(used, images, tmp_path, monkeypatch):
    (tmp_path / "some").mkdir()
    some = write_digits(tmp_path / "some" / "digits", 40)
    for place in (tmp_path, "s3://bucket/grown"):
        shutil.rmtree(some)
        write_digits(some, 40)
        done("embed", some, f"{place}/features", *MODEL)
        done("cluster", f"{place}/features", f"{place}/centers", "--clusters", 4)
        done("label", f"{place}/features", f"{place}/labels", "--centers", f"{place}/centers")
        write_digits(some, 60)
        elsewhere(monkeypatch, tmp_path, "another")
        done("embed", some, f"{place}/features", *MODEL, "--append")
        elsewhere(monkeypatch, tmp_path, "third")
        label = ("label", f"{place}/features", f"{place}/labels", "--centers", f"{place}/centers")
        done(*label, "--append")
        names = tmp_path / "names.json"
        names.write_text('{"1": "猫"}')
        assert f"{place}/centers" in done("name", f"{place}/centers", "--set", names)
    for name in ("features", "labels"):
        check_alike(used, f"grown/{name}", tmp_path / name, has_grown=True)
    elsewhere(monkeypatch, tmp_path, "fourth")
    index = ("index", "s3://bucket/grown/features", tmp_path / "collection")
    assert "60 items" in done(*index)
    assert "0 names changed, 1 of 4" in done("name", "s3://bucket/grown/centers", "--set", names)


@pytest.mark.parametrize("num", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_anywhere_it_goes_on_elsewhere(used, here, images, tmp_path, monkeypatch, num):
    files, chance = used.filesystem(), random.Random(3)
    command = [sys.executable, "-m", "mlcd", "embed", str(images), "s3://bucket/killed", *MODEL]
    with running_faults(used, seed=0, rate=0.0, delay_s=0.02) as slow:
        for number in range(num):
            before = slow.requests
            cache = str(tmp_path / f"lost-{number}")
            changed = {"AWS_ENDPOINT_URL": slow.url, "XDG_CACHE_HOME": cache}
            process = subprocess.Popen(command, env={**used.environment, **changed})
            until = before + chance.randint(2, 12)
            while process.poll() is None and slow.requests < until:
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)
            process.wait()
            if not files.exists(f"bucket/killed/{MANIFEST}"):
                for reading in (
                    ("verify", "s3://bucket/killed"),
                    ("cluster", "s3://bucket/killed", tmp_path / "no", "--clusters", 2),
                ):
                    assert "s3://bucket/killed must contain a finished artifact" in refused(
                        *reading
                    )
    elsewhere(monkeypatch, tmp_path, "new")
    done("embed", images, "s3://bucket/killed", *MODEL)
    check_alike(used, "killed", here / "features")
    files.rm("bucket/killed", recursive=True)


def test_of_two_machines_the_later_one_goes_on(used, tmp_path, monkeypatch):
    def draft(machine):
        elsewhere(monkeypatch, tmp_path, machine)
        return Draft(artifact_path("s3://bucket/both"), Request("tests", {}))

    def write(draft, name, content):
        with draft.write(name) as path:
            path.write_text(content)

    with draft("earlier") as earlier:
        write(earlier, "first", "by the earlier one")
        with draft("later") as later:
            assert later.file("first").read_text() == "by the earlier one"
            with pytest.raises(Conflict, match="s3://bucket/both was published, removed or taken"):
                write(earlier, "second", "by the earlier one")
            write(later, "second", "by the later one")
            later.publish()
        with pytest.raises(Conflict, match="taken over"):
            earlier.publish()
    [found] = verify_at_url("s3://bucket/both")
    assert "2 files" in found.detail
    assert used.filesystem().cat_file("bucket/both/second") == b"by the later one"


def test_damage_and_work_of_others_is_told(used, images, tmp_path, monkeypatch):
    files = used.filesystem()
    done("embed", images, "s3://bucket/told/features", *MODEL)
    cluster = ("cluster", "s3://bucket/told/features", "s3://bucket/told/centers", "--clusters")
    done(*cluster, 4)
    assert "s3://bucket/told/centers holds centers made from other" in refused(*cluster, 5)
    files.pipe_file("bucket/told/theirs/photo.jpg", b"x")
    to_theirs = ("cluster", "s3://bucket/told/features", "s3://bucket/told/theirs", "--clusters", 4)
    assert "contains other files, such as photo.jpg: give another output" in refused(*to_theirs)
    files.pipe_file("bucket/told/begun/.request.json", b"{}")
    to_begun = ("cluster", "s3://bucket/told/features", "s3://bucket/told/begun", "--clusters", 4)
    assert "s3://bucket/told/begun contains unfinished work on other" in refused(*to_begun)
    inside = ("embed", "s3://bucket/told", "s3://bucket/told/in", *MODEL)
    assert "lies inside the images s3://bucket/told" in refused(*inside)
    size = files.info("bucket/told/features/part-00000.npy")["size"]
    files.pipe_file("bucket/told/features/part-00000.npy", b"x" * size)
    told = "s3://bucket/told/features/part-00000.npy differs from its manifest"
    assert told in refused("verify", "s3://bucket/told/centers")
    elsewhere(monkeypatch, tmp_path, "another")
    assert told in refused(*cluster, 3)


def test_mistakes_are_one_line_each(used, images, tmp_path, monkeypatch):
    done("embed", images, "s3://bucket/one/features", *MODEL)
    features, out = "s3://bucket/one/features", tmp_path / "out"
    for command, told in (
        (("verify", "s3:/bucket/x"), "neither a path nor a URL: write s3://"),
        (
            ("index", features, "s3://bucket/x"),
            "this must be a local path, got the URL s3://bucket/x",
        ),
        (("embed", images, "s3://nowhere/x", *MODEL), "s3://nowhere/x does not exist"),
        (("cluster", features, "s3://bucket//x", "--clusters", 2), "s3://bucket//x: write it"),
        (
            ("embed", images, f"s3://a:{SECRET}@bucket/x", *MODEL),
            "the s3:// URL must not contain a password",
        ),
        (("export", "pixels", "s3://bucket/x", "--format", "triton"), "must be a local path"),
    ):
        assert told in refused(*command)
    with running_faults(used, seed=0, rate=0.0, denied=True) as denied:
        behind(denied, monkeypatch)
        told = "was denied: set the store's credentials"
        assert told in refused("cluster", features, out, "--clusters", 2)
        assert told in refused("embed", images, "s3://bucket/denied", *MODEL)
    (tmp_path / "file").touch()
    elsewhere(monkeypatch, tmp_path, "file")
    told = f"{tmp_path}/file/mlcd/artifacts cannot be created as a directory: name another cache with XDG"
    behind(used, monkeypatch)
    assert told in refused("cluster", features, out, "--clusters", 2)
    assert told in refused("embed", images, "s3://bucket/file", *MODEL)
    assert not out.exists()


def test_python_reads_what_is_there(used, images, tmp_path):
    import mlcd

    made = mlcd.embed(images, model="pixels", out="s3://bucket/python/features")
    centers = mlcd.cluster("s3://bucket/python/features", 4, out="s3://bucket/python/centers")
    labels = mlcd.label("s3://bucket/python/features", "s3://bucket/python/centers", top=2)
    assert (len(made.keys), centers.vectors.shape[0], labels.ids.shape) == (60, 4, (60, 2))
