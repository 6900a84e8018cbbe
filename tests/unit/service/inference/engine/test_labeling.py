"""Labels that the engine's process finds on its device: the bytes of the server's own scan."""

import asyncio
import io
import logging
import os
import re
import signal
from dataclasses import replace

import httpx
import numpy as np
import pytest
from PIL import Image

from mlcd.artifacts.centers import Centers
from mlcd.clustering.device_labels import DeviceLabels
from mlcd.encoders import open_encoder
from mlcd.service.http.app import create_app
from mlcd.service.inference.engine.labeling import DeviceCenters, open_centers_on_device
from mlcd.service.inference.engine.slots import MOST_LABELS
from mlcd.service.inference.engine.supervised import SupervisedEngine
from mlcd.service.inference.engine_labels import EngineLabels
from mlcd.service.inference.lookup import Lookup
from mlcd.service.inference.served import EngineOptions
from mlcd.service.resources import open_resources
from mlcd.service.settings import Settings
from tests.unit.service.engines import new_batcher, until
from tests.written_artifacts import write_centers

NUM_CENTERS, NUM_IMAGES = 700, 11


@pytest.fixture(scope="module")
def images():
    """Blocks of few colors, so that rows differ."""
    colors = np.random.default_rng(0).integers(0, 256, (NUM_IMAGES, 3, 8, 8), dtype=np.uint8)
    return colors.repeat(8, axis=2).repeat(8, axis=3)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "mean"])
def centers(request, images, tmp_path_factory):
    encoder = open_encoder("hog")
    rows = encoder.encode(images)
    random = np.random.default_rng(1)
    near = rows[random.integers(0, NUM_IMAGES, NUM_CENTERS)]
    vectors = near + 0.05 * random.standard_normal(near.shape).astype(np.float32)
    vectors[40:400:40] = vectors[0]  # ties, which are left to the server
    mean = rows.mean(axis=0) / 3 if request.param else None
    path = tmp_path_factory.mktemp("centers") / "centers"
    write_centers(path, vectors, encoder.fingerprint, mean=mean)
    return path


def options(centers, **changes):
    given = {"max_batch": 8, "centers": str(centers), "centers_device": "cpu"} | changes
    return EngineOptions("hog", **given)


def running(centers, **changes):
    return SupervisedEngine(options(centers, **changes), batch_timeout_s=10)


def png(image):
    buffer = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(buffer, "PNG")
    return buffer.getvalue()


async def ask(batcher, images, lookup, top, threshold=None):
    """Encodes images as one request, and returns its rows, labels, and what the engine found."""
    labels = EngineLabels(lookup.centers.digest, top)
    with labels.request():
        rows = await asyncio.gather(*(batcher.encode(image) for image in images))
    embeddings = np.stack([row.embedding for row in rows])
    return embeddings, lookup.nearest(embeddings, top, threshold, engine_labels=labels), labels


async def test_requests_of_several_clients_are_answered_from_one_batch(centers, images):
    lookup = Lookup(Centers.open(centers))
    async with running(centers) as engine, new_batcher(engine) as batcher:
        assert engine.labels_of == lookup.centers.digest
        sent, encode = [], engine.encode

        async def watched(batch):
            sent.append((len(batch.items), len(batch.rows), batch.top))
            return await encode(batch)

        engine.encode = watched
        plain = batcher.encode(images[5])
        asked = [
            ask(batcher, images[:3], lookup, 3),
            ask(batcher, images[3:5], lookup, 20, 0.2),
            ask(batcher, images[6:8], lookup, 8),
        ]
        _, *answers = await asyncio.gather(plain, *asked)
        assert sent == [(8, 0, 20)]
    for (embeddings, found, labels), top, threshold in zip(
        answers, (3, 20, 8), (None, 0.2, None), strict=True
    ):
        alone = lookup.nearest(embeddings, top, threshold)
        assert found.ids.tobytes() == alone.ids.tobytes()
        assert found.scores.tobytes() == alone.scores.tobytes()
        assert labels.num_used > 0


async def test_only_labels_of_these_centers_and_no_more_than_fit_are_asked_for(centers, images):
    lookup = Lookup(Centers.open(centers))
    async with running(centers) as engine, new_batcher(engine) as batcher:
        embeddings, found, labels = await ask(batcher, images[:2], lookup, MOST_LABELS + 1)
        assert (labels.num_used, bool(labels)) == (0, False)
        assert found.ids.tobytes() == lookup.nearest(embeddings, MOST_LABELS + 1).ids.tobytes()
        others = EngineLabels("e" * 64, 8)
        with others.request():
            await batcher.encode(images[0])
        assert not others


async def test_rows_without_labels_are_labeled_beside_the_images_of_others(centers, images):
    """Such as rows of a cache, of texts, or that a client has sent."""
    lookup = Lookup(Centers.open(centers))
    rows = open_encoder("hog").encode(images)[1:]
    async with running(centers) as engine, new_batcher(engine) as batcher:
        sent, encode = [], engine.encode

        async def watched(batch):
            sent.append((len(batch.items), len(batch.rows)))
            return await encode(batch)

        async def label(embeddings, *, deadline_s=10.0):
            labels = EngineLabels(lookup.centers.digest, 5)
            with labels.request():
                deadline = asyncio.get_running_loop().time() + deadline_s
                await batcher.label(embeddings, deadline=deadline)
                await batcher.label(embeddings, deadline=deadline)  # nothing is left
            return lookup.nearest(embeddings, 5, engine_labels=labels), labels.num_used

        engine.encode = watched
        others = ask(batcher, images[:3], lookup, 8)
        _, (own, num_used) = await asyncio.gather(others, label(rows[:4]))
        assert sent == [(3, 4)]
        await asyncio.gather(label(rows), label(rows[:0]))
        assert sent[1:] == [(0, 8), (0, 2)]
        too_many = np.repeat(rows, 11, axis=0)  # for the queue
        assert (await label(too_many))[1] == 0
        assert len(sent) == 3
        os.kill(engine.pid, signal.SIGSTOP)
        assert (await label(rows, deadline_s=0.3))[1] == 0
        os.kill(engine.pid, signal.SIGKILL)
    assert own.ids.tobytes() == lookup.nearest(rows[:4], 5).ids.tobytes()
    assert own.scores.tobytes() == lookup.nearest(rows[:4], 5).scores.tobytes()
    assert num_used > 0


async def test_an_engine_without_centers_answers_as_before(centers, images):
    lookup = Lookup(Centers.open(centers))
    plain = SupervisedEngine(EngineOptions("hog", max_batch=8), batch_timeout_s=10)
    async with plain as engine, new_batcher(engine) as batcher:
        assert engine.labels_of is None
        *_, labels = await ask(batcher, images[:2], lookup, 8)
        assert not labels


async def test_a_new_process_of_the_engine_labels_as_the_first(centers, images):
    lookup = Lookup(Centers.open(centers))
    async with running(centers) as engine, new_batcher(engine) as batcher:
        before = await ask(batcher, images[:4], lookup, 8)
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: not engine.up)
        assert engine.labels_of in (None, lookup.centers.digest)
        await until(lambda: engine.up)
        after = await ask(batcher, images[:4], lookup, 8)
        assert engine.labels_of == lookup.centers.digest
    assert after[1].scores.tobytes() == before[1].scores.tobytes()
    assert after[2].num_used == before[2].num_used > 0


def test_a_device_that_fails_leaves_labels_to_the_server(centers, caplog):
    class Failing:
        def nearest(self, rows, top):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    centers_on_device = DeviceCenters(Centers.open(centers), Failing())
    rows = centers_on_device.centers.vectors[:3]
    for _ in range(2):
        assert (centers_on_device.label(rows, 5) == -1).all()
    assert caplog.text.count("labels are found on the CPU from now on: RuntimeError") == 1


@pytest.mark.parametrize(
    ("device", "engine", "text"),
    [
        ("cpu", "hog", "labels are found on cpu: 700 centers"),
        ("cuda", "openvino", ""),
        ("cuda", "torch", "labels are found on the CPU: 700 centers are few"),
    ],
)
def test_the_log_says_where_labels_are_found(centers, device, engine, text, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "mlcd.service")
    for module in ("mlcd.clustering.device_labels", "mlcd.encoders.torch"):
        monkeypatch.setattr(f"{module}.cuda_available", lambda: True)
    opened = open_centers_on_device(options(centers, centers_device=device), engine)
    assert (opened is not None) == (device == "cpu")
    assert text in caplog.text
    assert bool(caplog.text) == bool(text)


def test_centers_that_the_device_cannot_scan_are_left_to_the_server(centers, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(DeviceLabels, "nearest", fail)
    assert open_centers_on_device(options(centers), "torch") is None
    assert "labels are found on the CPU: RuntimeError" in caplog.text


async def test_the_answers_over_http_have_the_same_bytes(centers, images, monkeypatch):
    """Two servers of the same model and centers; the engine of one labels."""
    from_settings = EngineOptions.from_settings
    bodies, facts = [], []
    for device in ("cuda", "cpu"):
        monkeypatch.setattr(
            EngineOptions,
            "from_settings",
            lambda *given, device=device, **named: replace(
                from_settings(*given, **named), centers_device=device
            ),
        )
        settings = Settings(model="hog", centers=str(centers))
        async with open_resources(settings, "hog") as resources:
            app = httpx.ASGITransport(create_app(resources))
            async with httpx.AsyncClient(transport=app, base_url="http://localhost") as client:
                answers = await asyncio.gather(
                    *(
                        client.post(
                            f"/v1/labels?top={top}",
                            files=[("files", ("x.png", png(image))) for image in images[:top]],
                            headers={"Accept": accept},
                        )
                        for top in (1, 8, 70)
                        for accept in ("application/octet-stream", "application/json")
                    )
                )
                assert {answer.status_code for answer in answers} == {200}, answers[0].text
                rows = open_encoder("hog").encode(images).tolist()
                for _ in range(2):
                    sent = [
                        client.post("/v1/labels", json={"embeddings": rows}),
                        client.post("/v1/labels", files=[("files", ("x.png", png(images[0])))]),
                    ]
                    answers += await asyncio.gather(*sent)
                bodies.append([answer.content for answer in answers])
                info = (await client.get("/v1/info")).json()["centers"]["labels_by"]
                ready = (await client.get("/health/ready")).status_code
                facts.append((info, ready, (await client.get("/metrics")).text))
    assert bodies[0] == bodies[1]
    assert [fact[:2] for fact in facts] == [("server", 200), ("engine", 200)]
    num_found = [
        sum(map(float, re.findall(r'labels_found_total{.*by="engine".*} (\S+)', text)))
        for *_, text in facts
    ]
    assert num_found[0] == 0 < num_found[1]
    assert num_found[1] > 2 * (NUM_IMAGES + 1)
