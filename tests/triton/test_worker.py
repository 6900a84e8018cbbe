"""A job done by `mlcd worker` with Triton as its engine, which is away for a while."""

import contextlib
import os
import time

import numpy as np
import pytest

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import draft_path
from mlcd.encoders.openvino import OpenVinoEncoder, read_onnx
from mlcd.images.sources import open_source
from mlcd.models import zoo
from mlcd.service.jobs.job import JobSpec
from mlcd.service.jobs.service import open_queue
from mlcd.service.settings import read_settings
from tests.conftest import start_mlcd, write_digits

pytestmark = pytest.mark.triton

PATIENCE_S = 90.0


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_job_outlives_triton(own_server, weights, repository, tmp_path):
    images = write_digits(tmp_path / "images", 900)
    model = zoo.load(str(weights))
    with contextlib.closing(
        open_queue(read_settings({"model": "hog", "state_dir": str(tmp_path)}))
    ) as queue:
        job = queue.submit(
            JobSpec("embed", str(images), str(tmp_path / "out"), fingerprint=model.fingerprint())
        )[0]
        given = {"MLCD_ENGINE": "triton", "MLCD_TRITON__URL": own_server.url}
        given |= {"MLCD_JOBS__ROOTS": str(tmp_path), "MLCD_JOBS__SHARD_IMAGES": "100"}
        process = start_mlcd(
            "worker", "--model", "tiny", "--state", tmp_path, "--drain", env={**os.environ, **given}
        )
        try:
            until(lambda: len(list(draft_path(tmp_path / "out").glob("part-*.npy"))) > 1)
            own_server.kill()
            time.sleep(1)
            own_server.start()
            output, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, output
        assert output.count("the engine cannot be used now") == 1
        assert (queue.get(job.id).state, queue.get(job.id).failed_items) == ("succeeded", 0)
    made = EmbeddingsArtifact.open(tmp_path / "out")
    assert made.artifact.config["engine"] == "triton"
    graph = read_onnx(repository / "tiny" / "1" / "model.onnx")
    embedded = OpenVinoEncoder(graph, name="tiny", fingerprint="", preprocess=model.preprocess)
    source = open_source(str(images))
    pixels = np.stack(
        [model.preprocess.prepare(source.read(entry)) for entry in source.entries[:64]]
    )
    assert np.abs(made.load()[:64] - embedded.encode(pixels)).max() < 1e-5
