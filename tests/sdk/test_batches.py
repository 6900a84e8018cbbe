"""Files and batches by the clients of OpenAI, Python and Node, and by LiteLLM, unchanged."""

import base64
import io
import json
import shutil
import subprocess
import time
import zipfile
from pathlib import Path

import httpx
import litellm
import numpy as np
import openai
import pytest
from PIL import Image

from tests.sdk.conftest import serving

NUM_IMAGES = 2000
ENDED = ("completed", "failed", "expired", "cancelled")
NODE = Path(__file__).parents[2] / ".venv-sdk" / "node"
SCRIPT = """
import OpenAI, { toFile } from "openai";
const client = new OpenAI({ baseURL: process.argv[1] + "/v1", apiKey: "unused" });
const pieces = [];
for await (const piece of process.stdin) pieces.push(piece);
const [name, purpose] = process.argv.slice(2);
const file = await client.files.create({
  file: await toFile(Buffer.concat(pieces), name), purpose,
});
let batch = await client.batches.create({
  input_file_id: file.id, endpoint: "/v1/embeddings", completion_window: "24h",
});
while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
  await new Promise((done) => setTimeout(done, 200));
  batch = await client.batches.retrieve(batch.id);
}
const output = await client.files.content(batch.output_file_id);
process.stdout.write(JSON.stringify({ batch, output: await output.text() }));
"""


@pytest.fixture(scope="module")
def url(prepared, tmp_path_factory):
    state = tmp_path_factory.mktemp("state")
    with serving(prepared / "demo" / "model", "--state", state) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        yield client


@pytest.fixture(scope="module")
def uris():
    rng, uris = np.random.default_rng(0), []
    for _ in range(NUM_IMAGES):
        out = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (8, 8, 3)).astype(np.uint8)).save(out, "PNG")
        uris.append("data:image/png;base64," + base64.b64encode(out.getvalue()).decode())
    return uris


def to_jsonl(bodies, endpoint):
    return "".join(
        json.dumps({"custom_id": f"{number}", "method": "POST", "url": endpoint, "body": body})
        + "\n"
        for number, body in enumerate(bodies)
    ).encode()


def to_zip(uris):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number, uri in enumerate(uris):
            archive.writestr(f"{number:04}.png", base64.b64decode(uri.partition(",")[2]))
    return out.getvalue()


def finished(client, batch):
    while batch.status not in ENDED:
        time.sleep(0.3)
        batch = client.batches.retrieve(batch.id)
    return batch


@pytest.mark.parametrize("endpoint", ["/v1/embeddings", "/v1/labels"])
def test_batches_of_2000_images_equal_the_synchronous_answers(client, url, model, uris, endpoint):
    bodies = [
        {"model": model, "input": [uri]} if endpoint == "/v1/embeddings" else {"images": [uri]}
        for uri in uris
    ]
    content = to_jsonl(bodies, endpoint)
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert file.bytes == len(content)
    batch = client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"of": "tests"}
    )
    batch = finished(client, batch)
    counts = batch.request_counts
    assert (batch.status, counts.completed, counts.failed) == ("completed", NUM_IMAGES, 0)
    assert (batch.metadata, batch.error_file_id) == ({"of": "tests"}, None)
    rows = [json.loads(line) for line in client.files.content(batch.output_file_id).iter_lines()]
    assert [row["custom_id"] for row in rows] == [f"{number}" for number in range(NUM_IMAGES)]
    for number in range(0, NUM_IMAGES, 97):
        answer = httpx.post(f"{url}{endpoint}", json=bodies[number]).json()
        assert rows[number]["response"]["body"] == answer
    assert batch.id in [each.id for each in client.batches.list(limit=1)]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


@pytest.mark.parametrize("endpoint", ["/v1/embeddings", "/v1/labels"])
def test_a_batch_of_an_archive_of_2000_images(client, url, model, uris, endpoint):
    file = client.files.create(file=("photos.zip", to_zip(uris)), purpose="images")
    batch = finished(
        client,
        client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h"),
    )
    assert (batch.status, batch.request_counts.completed) == ("completed", NUM_IMAGES)
    rows = [json.loads(line) for line in client.files.content(batch.output_file_id).iter_lines()]
    assert [row["custom_id"] for row in rows] == [
        f"{number:04}.png" for number in range(NUM_IMAGES)
    ]
    for number in range(0, NUM_IMAGES, 97):
        uri = uris[number]
        body = {"model": model, "input": [uri]} if "emb" in endpoint else {"images": [uri]}
        answer = httpx.post(f"{url}{endpoint}", json=body).json()
        assert rows[number]["response"]["body"] == answer


def test_an_upload_in_parts(client, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 300_000)
    done = client.uploads.upload_file_chunked(
        file=path, mime_type="application/jsonl", purpose="batch", part_size=100_000
    )
    assert (done.status, done.file.bytes) == ("completed", 300_000)
    assert client.files.content(done.file.id).read() == path.read_bytes()


def test_a_batch_that_is_canceled(client, model, uris):
    bodies = [{"model": model, "input": uris[:64]}] * 200
    file = client.files.create(file=to_jsonl(bodies, "/v1/embeddings"), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    assert finished(client, batch).status == "cancelled"


def test_litellm(url, model, uris):
    options = {
        "custom_llm_provider": "openai",
        "api_base": f"{url}/v1",
        "api_key": "unused",
    }
    content = to_jsonl([{"model": model, "input": [uri]} for uri in uris[:20]], "/v1/embeddings")
    file = litellm.create_file(file=("in.jsonl", content), purpose="batch", **options)
    batch = litellm.create_batch(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h", **options
    )
    while batch.status not in ENDED:
        time.sleep(0.3)
        batch = litellm.retrieve_batch(batch_id=batch.id, **options)
    assert batch.request_counts.completed == 20
    output = litellm.file_content(file_id=batch.output_file_id, **options)
    assert len(output.content.splitlines()) == 20


@pytest.mark.skipif(
    shutil.which("node") is None or not NODE.is_dir(),
    reason="Node, or its client of OpenAI, is not installed",
)
@pytest.mark.parametrize(("name", "purpose"), [("in.jsonl", "batch"), ("in.zip", "images")])
def test_node(url, model, uris, name, purpose):
    bodies = [{"model": model, "input": [uri]} for uri in uris[:20]]
    content = to_zip(uris[:20]) if purpose == "images" else to_jsonl(bodies, "/v1/embeddings")
    done = subprocess.run(
        ["node", "--input-type=module", "-e", SCRIPT, url, name, purpose],
        input=content,
        cwd=NODE,
        capture_output=True,
        check=True,
        timeout=60,
    )
    answer = json.loads(done.stdout)
    assert answer["batch"]["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert len(answer["output"].splitlines()) == 20
