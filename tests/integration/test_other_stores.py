"""The commands on stores as Azure's and Google's: emulators of these, the first one Azure's own."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest

from mlcd.artifacts.manifest import open_artifact
from tests.conftest import call_mlcd, free_port, write_digits
from tests.integration.s3 import listening
from tests.integration.test_artifacts_at_urls import MADE, MODEL, commands, done, elsewhere, refused

_AZURITE = Path(__file__).parents[1] / "azurite" / "node_modules" / ".bin" / "azurite-blob"
_ACCOUNT = "devstoreaccount1"
# the key that is in every copy of the emulator
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

pytestmark = pytest.mark.slow


@contextmanager
def azure():
    pytest.importorskip("adlfs")
    node = shutil.which("node")
    if node is None or not _AZURITE.is_file():
        pytest.skip("azurite is not installed: make azurite")
    port = free_port()
    options = "--silent", "--disableTelemetry", "--inMemoryPersistence", "--skipApiVersionCheck"
    endpoint = f"http://127.0.0.1:{port}/{_ACCOUNT}"
    told = {"AccountName": _ACCOUNT, "AccountKey": _KEY, "BlobEndpoint": endpoint}
    connection = ";".join(f"{name}={value}" for name, value in told.items())
    with listening([node, str(_AZURITE), *options, "--blobPort", str(port)], port):
        yield "az", {"AZURE_STORAGE_CONNECTION_STRING": connection}


@contextmanager
def google():
    for package in ("gcsfs", "gcp_storage_emulator"):
        pytest.importorskip(package)
    port = free_port()
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", "--quiet", "--in-memory"]
    with listening([*command, "--host", "127.0.0.1", "--port", str(port)], port):
        # the emulator does not tell the type of a bucket, for which gcsfs would ask Google
        asked = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        yield "gs", {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}", **asked}


@pytest.fixture(params=[azure, google])
def bucket(request, tmp_path):
    """The URL of a bucket with the images, on a store that this process may use."""
    with request.param() as (protocol, environment), pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        files = fsspec.filesystem(protocol, skip_instance_cache=True)
        files.mkdir("bucket")
        folder = write_digits(tmp_path / "images", 40)
        for path in folder.rglob("*.png"):
            files.put_file(str(path), f"bucket/images/{path.relative_to(folder)}")
        yield f"{protocol}://bucket"
        files.clear_instance_cache()


def test_the_commands_make_the_same_there_and_killed_they_go_on(bucket, tmp_path, monkeypatch):
    images, chance = tmp_path / "images", random.Random(1)
    for place, source in ((str(tmp_path), images), (bucket, f"{bucket}/images")):
        for command in commands(source, place):
            done(*command)
    verified = done("verify", f"{bucket}/labels")
    assert verified.count("\nok ") + verified.startswith("ok ") == 3, verified
    elsewhere(monkeypatch, tmp_path, "another")
    for name in MADE:
        done("sync", f"{bucket}/{name}", tmp_path / "back" / name)
        back, here = (open_artifact(each / name) for each in (tmp_path / "back", tmp_path))
        assert back.digest == here.digest, name
    command = [sys.executable, "-m", "mlcd", "embed", str(images), f"{bucket}/killed", *MODEL]
    for number in range(3):
        elsewhere(monkeypatch, tmp_path, f"lost-{number}")
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        time.sleep(chance.uniform(1, 4))
        process.send_signal(signal.SIGKILL)
        process.wait()
        told = call_mlcd("verify", f"{bucket}/killed")
        assert told.returncode == 0 or "must contain a finished artifact" in told.stderr, (
            told.stderr
        )
    done("embed", images, f"{bucket}/killed", *MODEL)
    assert open_artifact(tmp_path / "features").digest[:12] in done("verify", f"{bucket}/killed")
    names = fsspec.filesystem(bucket[:2], use_listings_cache=False).find("bucket/killed")
    assert not [name for name in names if "/." in name]


def test_mistakes_are_one_line_each(bucket, tmp_path, monkeypatch):
    images = tmp_path / "images"
    embed = ("embed", images)
    assert f"{bucket[:5]}nowhere/x does not exist" in refused(
        *embed, f"{bucket[:5]}nowhere/x", *MODEL
    )
    assert f"no images at {bucket}/no" in refused("embed", f"{bucket}/no", tmp_path / "x", *MODEL)
    done(*embed, f"{bucket}/taken", *MODEL)
    told = "holds embeddings made from other"
    assert told in refused("embed", f"{bucket}/images/1", f"{bucket}/taken", *MODEL)
    if bucket.startswith("gs"):  # its emulator asks nobody who they are
        return
    connection, anew = "AZURE_STORAGE_CONNECTION_STRING", fsspec.get_filesystem_class("az")
    monkeypatch.setenv(connection, os.environ[connection].replace(_KEY, f"AAAA{_KEY[4:]}"))
    anew.clear_instance_cache()
    assert "was denied" in refused(*embed, f"{bucket}/x", *MODEL)
    monkeypatch.delenv(connection)
    anew.clear_instance_cache()
    assert "requires credentials" in refused(*embed, f"{bucket}/x", *MODEL)
