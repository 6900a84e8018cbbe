"""A server, an exploration and a worker whose model is behind an endpoint that dies and is back."""

import base64
import io
import os
import signal
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest
from PIL import Image

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.service.jobs.job import FINISHED, JobSpec
from mlcd.service.jobs.service import open_queue
from mlcd.service.settings import read_settings
from tests.conftest import free_port, refuse, start_mlcd, succeed, write_digits
from tests.endpoint_stub import SIDE, Stub, image_row, text_row
from tests.integration.running import Server, serving, until

KEY = "sk-0123456789-secret"


@pytest.fixture
def stub(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MLCD_ENDPOINT_KEY", KEY)
    started = Stub()
    yield started
    started.down()


def png(color=(200, 90, 10)):
    buffer = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), color).save(buffer, "PNG")
    return buffer.getvalue()


def unit(row):
    return row / np.linalg.norm(row)


def embed(server, item):
    body = {"model": "Some-Model", "input": item}
    return httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=30)


def rows_of(answer):
    return np.array([entry["embedding"] for entry in answer.json()["data"]])


def uri(image):
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def test_a_server_answers_503_while_the_endpoint_is_away_and_is_back_by_itself(stub):
    with serving(stub.url(), cache__memory_bytes=0) as server:
        expected = [unit(image_row(png())), unit(text_row("a cat"))]
        answer = embed(server, [uri(png()), "a cat"])
        np.testing.assert_allclose(rows_of(answer), expected, atol=1e-6)
        stub.down()
        away = embed(server, uri(png()))
        assert (away.status_code, away.json()["error"]["code"]) == (503, "unavailable")
        assert 1 <= int(away.headers["retry-after"]) <= 30
        until(lambda: not server.ready(), 5)
        assert embed(server, "a cat").status_code == 503
        stub.up()
        until(server.ready, 60, server)
        np.testing.assert_allclose(
            rows_of(embed(server, [uri(png()), "a cat"])), expected, atol=1e-6
        )
        page = httpx.get(f"{server.url}/v1/info").text
        environment = [path for path in os.environ if path.startswith("MLCD_ENDPOINT")]
        assert environment == ["MLCD_ENDPOINT_KEY"]
        status, output = server.stop()
    assert status == 0
    assert KEY not in output + page
    assert "trying again for up to 4 s" in output


def test_a_server_whose_endpoint_comes_back_with_another_model_stays_down(stub):
    with serving(stub.url(), cache__memory_bytes=0) as server:
        stub.down()
        stub.turn = 5
        embed(server, uri(png()))
        stub.up()
        deadline = time.monotonic() + 12
        while time.monotonic() < deadline:
            assert embed(server, uri(png())).status_code == 503
            time.sleep(0.5)
        assert not server.ready()
        _, output = server.stop()
        assert "have drifted: another model is behind it" in output


def test_a_server_does_not_start_without_its_endpoint(stub):
    stub.down()
    server = Server(stub.url())
    output, _ = server.process.communicate(timeout=90)
    assert server.process.returncode != 0
    assert "cannot be reached" in output
    assert "Traceback" not in output
    stub.up()


def test_an_exploration_survives_the_death_of_its_endpoint(stub, tmp_path):
    photos = write_digits(tmp_path / "photos", 200)
    stub.sleep_s = 0.3
    command = [sys.executable, "-m", "mlcd", "explore", photos, "--model", stub.url()]
    command += ["--state", tmp_path / "state", "--port", port := free_port(), "--no-browser"]
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )

    def now():
        try:
            return httpx.get(f"http://127.0.0.1:{port}/v1/exploration", timeout=5).json()
        except httpx.TransportError:
            return {"stage": "none", "pictures": 0}

    try:
        until(lambda: 0 < now()["pictures"] < 200, 60)
        stub.down()
        time.sleep(8)  # longer than the engine waits
        assert now()["stage"] == "embed"
        assert now()["pictures"] < 200
        stub.sleep_s = 0
        stub.up()
        until(lambda: now()["stage"] in ("done", "failed"), 120)
        assert (now()["stage"], now()["pictures"]) == ("done", 200), now()
    finally:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    assert "Traceback" not in output
    assert KEY not in output
    succeed("verify", tmp_path / "state" / "embeddings")
    rows = EmbeddingsArtifact.open(tmp_path / "state" / "embeddings")
    assert len(rows.keys) == 200
    for key, row in list(zip(rows.keys, rows.load(), strict=True))[:20]:
        image = Image.open(photos / key).convert("RGB").resize((SIDE, SIDE), Image.BICUBIC)
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        np.testing.assert_allclose(row, unit(image_row(buffer.getvalue())), atol=1e-6)


def test_a_job_waits_for_its_endpoint(stub, tmp_path):
    photos = write_digits(tmp_path / "photos", 120)
    succeed("embed", photos, tmp_path / "alone", "--model", stub.url())
    alone = EmbeddingsArtifact.open(tmp_path / "alone")
    settings = {"model": "hog", "state_dir": str(tmp_path / "state")}
    queue = open_queue(read_settings(settings))
    spec = JobSpec("embed", str(photos), str(tmp_path / "out"), fingerprint=alone.fingerprint)
    job = queue.submit(spec)[0].id
    environment = {**os.environ, "MLCD_JOBS__ROOTS": str(tmp_path), "MLCD_JOBS__SHARD_IMAGES": "8"}
    stub.sleep_s = 0.2
    arguments = ("worker", "--model", stub.url(), "--state", tmp_path / "state")
    worker = start_mlcd(*arguments, env=environment)
    try:
        until(lambda: 0 < queue.get(job).done < 120, 60)
        stub.down()
        time.sleep(7)
        stub.sleep_s = 0
        stub.up()
        until(lambda: queue.get(job).state in FINISHED, 60)
        assert queue.get(job).state == "succeeded"
    finally:
        worker.terminate()
        output, _ = worker.communicate(timeout=30)
        queue.close()
    assert "Traceback" not in output
    rows = EmbeddingsArtifact.open(tmp_path / "out")
    assert list(rows.keys) == list(alone.keys)
    np.testing.assert_array_equal(rows.load(), alone.load())


@pytest.mark.parametrize("command", ["export {} out", "quantize {} photos out", "evaluate knn {}"])
def test_commands_that_read_weights_refuse_an_endpoint_without_telling_its_password(command):
    line = refuse(
        *command.format("openai+https://ann:secret@h.example/v1#m").split(),
        contains="reads weights, and an endpoint does not give any",
    )
    assert "secret" not in line
