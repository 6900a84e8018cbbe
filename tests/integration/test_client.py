"""The Python client against real servers."""

import ast
import asyncio
import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from mlcd.artifacts.centers import Centers
from mlcd.client import AsyncClient, Client, RefusedInput, RefusedNotFound
from mlcd.errors import ConfigInvalid, Conflict, ImageRejected, InvalidInput
from tests.conftest import free_port, start_mlcd
from tests.integration.running import serving, until

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "client.md"


@pytest.fixture(scope="module")
def mlcd_client(server):
    with Client(server, batch_size=8, in_flight=3) as client:
        yield client


@pytest.fixture(scope="module")
def paths(digits, stored):
    return [digits / key for key in stored.keys]


@pytest.fixture(scope="module")
def rows(stored):
    return stored.load()


@pytest.fixture(scope="module")
def centers(journey):
    return Centers.open(journey / "model" / "centers")


@contextlib.contextmanager
def serving_at(port, model, **settings):
    """Serves as `serving` does, at a given port and without waiting: a client that has had an
    answer from there waits.
    """
    given = {
        f"MLCD_{name.upper()}": str(value) for name, value in ({"drain_s": 0} | settings).items()
    }
    process = start_mlcd("serve", "--model", model, "--port", port, env={**os.environ, **given})
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=20)


def wait_for_answers(port):
    def answers():
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/health/live").status_code == 200
        return False

    until(answers, 60)


def test_vectors_are_those_of_mlcd_embed(mlcd_client, paths, rows):
    embedded = mlcd_client.embed(paths)
    assert embedded.vectors.dtype == np.float32
    assert embedded.vectors == pytest.approx(rows, abs=1e-5)
    assert embedded.errors == {}
    info = mlcd_client.info()
    said = embedded.origin
    expected = (info.model, info.fingerprint, 1)
    assert (said.model, said.fingerprint, said.preprocess_version) == expected
    assert mlcd_client.embed([]).vectors.shape == (0, rows.shape[1])


def test_every_kind_of_image_gives_the_same_vector(mlcd_client, paths, rows):
    pixels = np.asarray(Image.open(paths[3]).convert("RGB"))
    kinds = [str(paths[3]), paths[3].read_bytes(), Image.open(paths[3]), pixels, pixels[..., 0]]
    vectors = mlcd_client.embed(kinds).vectors
    assert vectors == pytest.approx(np.stack([rows[3]] * len(kinds)), abs=1e-5)
    assert mlcd_client.embed(np.stack([pixels, pixels])).vectors == pytest.approx(
        rows[[3, 3]], abs=1e-5
    )


def test_bad_images_fail_alone(mlcd_client, paths, rows, tmp_path):
    bad = {3: b"no image", 4: b"", 11: paths[0].read_bytes()[:60], 12: tmp_path / "absent.png"}
    bad |= {20: None}
    reasons = {3: "unsupported-format", 4: "empty", 11: "undecodable", 12: "unreadable"}
    reasons |= {20: "unreadable"}
    images = [bad.get(i, path) for i, path in enumerate(paths[:25])]
    embedded = mlcd_client.embed(images)
    assert {index: error.reason for index, error in embedded.errors.items()} == reasons
    good = [i for i in range(25) if i not in bad]
    assert embedded.vectors[good] == pytest.approx(rows[good], abs=1e-5)
    assert np.isnan(embedded.vectors[list(bad)]).all()
    each = list(mlcd_client.embed_each(images))
    assert {
        i: error.reason for i, error in enumerate(each) if isinstance(error, ImageRejected)
    } == reasons
    labeled = mlcd_client.labels(images, top=2)
    assert {index: error.reason for index, error in labeled.errors.items()} == reasons
    assert (labeled.ids[list(bad)] == -1).all()
    assert (labeled.ids[good] >= 0).all()
    assert list(mlcd_client.embed([None, b"no image"]).errors) == [0, 1]
    with pytest.raises(ImageRejected, match="image 3: not one of"):
        mlcd_client.embed(images, strict=True)


def test_labels_are_the_nearest_centers(mlcd_client, paths, rows, centers):
    similarities = rows[:30].astype(np.float64) @ centers.vectors.T.astype(np.float64)
    nearest = np.argsort(-similarities, axis=1, kind="stable")[:, :3]
    labeled = mlcd_client.labels(paths[:30], top=3)
    assert (labeled.ids == nearest).all()
    assert labeled.scores == pytest.approx(np.take_along_axis(similarities, nearest, 1), abs=1e-4)
    assert labeled.names == [[centers.name(int(i)) for i in ids] for ids in nearest]
    assert labeled.origin.centers == centers.digest
    by_rows = mlcd_client.labels(embeddings=3 * rows[:30].astype(np.float64), top=3)
    assert (by_rows.ids == nearest).all()
    cut = float(np.median(labeled.scores))
    kept = mlcd_client.labels(paths[:30], top=3, threshold=cut)
    assert ((kept.ids >= 0) == (labeled.scores >= cut)[:, : kept.ids.shape[1]]).all()
    each = list(mlcd_client.labels_each(paths[:30], top=3))
    assert [[label.id for label in labels] for labels in each] == nearest.tolist()


def test_search_by_image_embedding_and_key(mlcd_client, paths, rows, stored):
    by_image = mlcd_client.search("demo", paths[:20], top=4)
    by_row = mlcd_client.search("demo", embeddings=rows[:20], top=4)
    by_key = mlcd_client.search("demo", key=stored.keys[7], top=4)
    assert [len(matches) for matches in by_image.matches] == [4] * 20
    for i in range(20):
        assert by_image.matches[i][0].similarity == pytest.approx(1, abs=1e-5)
        scores = [[match.similarity for match in found.matches[i]] for found in (by_image, by_row)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    assert by_key.matches[0][0].similarity == pytest.approx(1, abs=1e-5)
    assert by_key.matches[0][0].metadata.keys() == {"class_name"}
    for unknown, kind in (
        ("none", RefusedNotFound),
        ("../info", RefusedInput),
        ("a/b?c", RefusedInput),
    ):
        with pytest.raises(kind, match=r"does not exist|cannot name"):
            mlcd_client.search(unknown, paths[:1])


def test_collections_are_made_filled_searched_changed_and_deleted(mlcd_client, paths, rows):
    name, ids = "mine", [str(path) for path in paths[:20]]
    made = mlcd_client.create_collection(name, recall=0.9)
    try:
        assert (made.items, made.index.target, made.writable) == (0, 0.9, True)
        metadata = [{"n": n} for n in range(20)]
        added = mlcd_client.add(name, ids, [*paths[:19], b"no image"], metadata=metadata)
        assert added.outcomes == [*["created"] * 19, None]
        assert added.errors[19].reason == "unsupported-format"
        assert mlcd_client.add(
            name, ids[19:], embeddings=rows[19:20], metadata=metadata[19:]
        ).outcomes == ["created"]
        assert mlcd_client.add(name, ids[:2], embeddings=rows[5:7]).outcomes == ["updated"] * 2
        assert mlcd_client.collection(name).items == 20
        assert name in [one.name for one in mlcd_client.collections()]
        few = mlcd_client.search(
            name, embeddings=rows[:3], top=5, filter={"field": "n", "lt": 7}, exact=True
        )
        assert [len(matches) for matches in few.matches] == [5] * 3
        assert all(match.metadata["n"] < 7 for matches in few.matches for match in matches)
        assert mlcd_client.search(name, key=ids[9], threshold=0.99999).matches[0][0].metadata == {
            "n": 9
        }
        assert mlcd_client.search(name, key=ids[9], metadata=False).matches[0][0].metadata is None
        assert sorted(mlcd_client.duplicates(name, similarity=0.99999)[0])
        assert mlcd_client.item(name, ids[3]).embedding == pytest.approx(rows[3], abs=1e-6)
        mlcd_client.update_item(name, ids[3], {"album": "sea"})
        assert mlcd_client.item(name, ids[3]).metadata == {"album": "sea"}
        mlcd_client.delete_item(name, ids[3])
        for call in (mlcd_client.item, mlcd_client.delete_item):
            with pytest.raises(RefusedNotFound, match="lacks the item"):
                call(name, ids[3])
        for wrong in (ids[:1], ids[:3]):
            with pytest.raises(InvalidInput, match="each item must have one id"):
                mlcd_client.add(name, wrong, embeddings=rows[:2])
        odd = "../a b/?é."
        mlcd_client.add(name, [odd], embeddings=rows[:1])
        assert mlcd_client.item(name, odd).id == odd
    finally:
        mlcd_client.delete_collection(name)
    with pytest.raises(RefusedNotFound, match="collection does not exist"):
        mlcd_client.collection(name)


def test_labels_come_with_examples_where_they_are_asked_for(mlcd_client, paths):
    labeled = mlcd_client.labels(paths[:3], top=2, examples=1)
    assert [[len(examples) for examples in labels] for labels in labeled.examples] == [[1, 1]] * 3
    assert labeled.examples[0][0][0].id
    assert mlcd_client.labels(paths[:1], top=1).examples == [[[]]]


def test_a_center_and_the_server_describe_themselves(mlcd_client, centers, rows):
    center = mlcd_client.center(1)
    assert (center.id, center.size, center.name) == (1, centers.sizes[1], centers.name(1))
    assert 1 not in [other.id for other in center.nearest]
    assert len(center.examples) >= 8
    assert {"demo", None} >= {example.collection for example in center.examples} >= {"demo"}
    assert center.origin.centers == centers.digest
    with pytest.raises(RefusedNotFound) as caught:
        mlcd_client.center(100_000)
    assert caught.value.problem.request_id
    info = mlcd_client.info()
    assert info.dimension == rows.shape[1]
    assert info.centers.num_centers == len(centers.vectors)
    assert info.collections == ["demo"]
    assert info.limits["max_images"] == 64


def test_wrong_questions_are_refused_and_say_what_is_wrong(mlcd_client, paths, rows):
    one_of = "exactly one of images, texts, embeddings"
    with_nan = np.where(np.arange(20)[:, None] == 17, np.nan, rows[:20])
    for wrong, message in (
        (mlcd_client.labels, one_of),
        (lambda: mlcd_client.labels(paths[:1], embeddings=rows[:1]), one_of),
        (
            lambda: mlcd_client.search("demo", key="a", embeddings=rows[:1]),
            "text, texts, embeddings",
        ),
        (lambda: mlcd_client.labels(embeddings=rows[0]), "rows must have shape"),
        (lambda: mlcd_client.labels(embeddings=with_nan), "in row 17"),
        (
            lambda: mlcd_client.labels(embeddings=[[1, 2], [3]]),
            r"must be numbers \[N, D\], got list",
        ),
        (lambda: mlcd_client.labels(embeddings=rows[:1, :3]), "embedding 0 must be a vector of 16"),
        (lambda: mlcd_client.labels(paths[:1], top=0), "top must be at least 1"),
        (lambda: mlcd_client.embed(paths[0]), "put the one image into a list"),
        (lambda: mlcd_client.embed_each(paths[0]), "put the one image into a list"),
        (
            lambda: mlcd_client.labels(paths[:1], mode="approximate"),
            "does not offer approximate labels",
        ),
    ):
        with pytest.raises(InvalidInput, match=message):
            wrong()
    with pytest.raises(RefusedInput) as caught:
        mlcd_client.labels(paths[:1], top=5000)
    assert caught.value.problem.limit == "max_top"


async def test_the_async_client_gives_the_same(server, mlcd_client, paths, rows, stored):
    async def each_path():
        for path in paths:
            yield path

    async with AsyncClient(server, batch_size=8, in_flight=3) as client:
        embedded = await client.embed(each_path())
        assert embedded.vectors == pytest.approx(rows, abs=1e-5)
        each = [row async for row in client.embed_each(each_path())]
        assert np.stack(each) == pytest.approx(rows, abs=1e-5)
        labels = [labels async for labels in client.labels_each(paths[:9], top=3)]
        same = mlcd_client.labels(paths[:9], top=3).ids.tolist()
        assert [[label.id for label in row] for row in labels] == same
        query = {"key": stored.keys[7], "top": 3}
        assert await client.search("demo", **query) == mlcd_client.search("demo", **query)
        assert await client.info() == mlcd_client.info()


def test_threads_share_a_client(mlcd_client, paths, rows):
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(
            lambda i: mlcd_client.embed(paths[i : i + 20]).vectors, range(0, 160, 20)
        )
        assert np.concatenate(list(answers)) == pytest.approx(rows[:160], abs=1e-5)


def test_a_pinned_fingerprint_refuses_another_model(server, mlcd_client, paths):
    with Client(server, fingerprint=mlcd_client.info().fingerprint) as client:
        assert len(client.embed(paths[:1]).vectors) == 1
    with (
        Client(server, fingerprint="0" * 64) as client,
        pytest.raises(Conflict, match="not with 0"),
    ):
        client.embed(paths[:1])


@pytest.mark.parametrize(
    "wrong",
    [
        {"deadline_s": 0},
        {"deadline_s": float("nan")},
        {"batch_size": 0},
        {"in_flight": -1},
        {"retries": -1},
    ],
)
def test_options_that_cannot_work_are_refused(server, wrong):
    with pytest.raises(ConfigInvalid, match=next(iter(wrong))):
        Client(server, **wrong)


def test_closing_ends_the_calls_of_other_threads(paths):
    others = {thread.ident for thread in threading.enumerate()}
    with (
        serving("fake:latency_ms=1500", engine="fake", max_batch=1) as slow,
        ThreadPoolExecutor(1) as pool,
    ):
        client = Client(slow.url, batch_size=1, in_flight=3)
        client.info()
        call = pool.submit(client.embed, paths[:9])
        until(lambda: slow.metric('mlcd_held{of="images"}') >= 1, 5)
        started = time.monotonic()
        client.close()
        assert isinstance(call.exception(timeout=5), CancelledError)
        assert time.monotonic() - started < 1.4
        until(lambda: slow.metric('mlcd_held{of="images"}') == 0, 20)  # as of any who leaves
    assert {thread.ident for thread in threading.enumerate()} == others
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.info()


def test_limits_are_kept_and_a_large_image_fails_alone(paths, photo):
    size = max(path.stat().st_size for path in paths)
    limits = {"limits__max_images": 3, "limits__max_body_bytes": 2 * (size + 512)}
    with (
        serving("fake:latency_ms=1", engine="fake", **limits) as server,
        Client(server.url) as client,
    ):
        embedded = client.embed([*paths[:10], photo, *paths[10:20]])
        assert {index: error.reason for index, error in embedded.errors.items()} == {
            10: "too-many-bytes"
        }
        assert server.metric('mlcd_requests_total{route="/v1/images/embed",status="413"}') == 0
        assert server.metric('mlcd_requests_total{route="/v1/images/embed",status="200"}') >= 10


def test_smaller_limits_of_a_server_started_again_are_learned(paths):
    port = free_port()
    with Client(f"http://127.0.0.1:{port}", retries=20) as client:
        with serving_at(port, "fake:latency_ms=1", engine="fake"):
            wait_for_answers(port)
            client.embed(paths[:10])
        with serving_at(port, "fake:latency_ms=1", engine="fake", limits__max_images=2):
            with pytest.raises(RefusedInput, match="max_images"):
                client.embed(paths[:10])
            assert len(client.embed(paths[:10]).vectors) == 10


def test_it_needs_numpy_pydantic_and_httpx_alone_and_a_program_that_forgets_to_close_ends(
    server, paths
):
    code = f"""
import sys
heavy = ("torch", "faiss", "fastapi", "openvino", "pyarrow", "orjson", "PIL", "service")
for name in heavy:
    sys.modules[name] = None
from mlcd.client import Client
client = Client({server!r})
print(client.embed([{str(paths[0])!r}]).vectors.shape)
Client({server!r}).info()
each = client.embed_each([{str(paths[0])!r}] * 100)
next(each)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "(1, 16)\n", "")


def test_a_child_process_is_told_to_make_its_own(server):
    code = f"""
import os, warnings
from mlcd.client import Client
from mlcd.errors import ConfigInvalid
warnings.simplefilter("ignore")
client = Client({server!r})
client.info()
if os.fork() == 0:
    try:
        client.info()
    except ConfigInvalid as error:
        print(error, flush=True)
    client.close()
    os._exit(0)
os.wait()
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert (
        result.stdout == "this client belongs to another process: create one client per process\n"
    )


def test_what_the_page_shows_runs(model_to_change, new_state, digits, tmp_path, monkeypatch):
    """Not the server of the other tests: a center is named."""
    (tmp_path / "photos").symlink_to(digits / "3")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 7
    blocks = [block for block in blocks if "client.jobs" not in block]  # test_jobs.py runs it
    names: dict[str, object] = {}
    with serving(model_to_change, state_dir=new_state()) as own:
        code = "\n".join(blocks).replace("http://127.0.0.1:8000", own.url)
        compiled = compile(code, str(PAGE), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        asyncio.run(eval(compiled, names))
    assert np.isnan(names["embedded"].vectors).sum() == 0
    assert names["found"].matches[0][0].similarity == pytest.approx(1, abs=1e-5)
