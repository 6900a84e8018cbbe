"""Files, uploads in parts and batches of a real server."""

import base64
import hashlib
import io
import json
import random
import socket
import subprocess
import tarfile
import time
import zipfile
from datetime import UTC, datetime

import httpx
import numpy as np
import pytest
from PIL import Image

from mlcd.service.keys.file import create_key, revoke_key
from tests.integration.running import Server, asking, until

ENDPOINT = "/v1/embeddings"
RAW = {"Content-Type": "application/octet-stream"}
ENDED = ("completed", "failed", "expired", "cancelled")


def data_uri(seed):
    pixels = np.random.default_rng(seed).integers(0, 255, (16, 16, 3)).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def request_lines(num, model="pixels", endpoint=ENDPOINT):
    return [
        {
            "custom_id": f"image {number}",
            "method": "POST",
            "url": endpoint,
            "body": {"model": model, "input": [data_uri(number)]},
        }
        for number in range(num)
    ]


def to_jsonl(lines):
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def upload(client, content, **kwargs):
    return client.post(
        "/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}, **kwargs
    )


def begin(client, content, endpoint=ENDPOINT, window="24h", **kwargs):
    file = upload(client, content, **kwargs)
    assert file.status_code == 200, file.text
    body = {"input_file_id": file.json()["id"], "endpoint": endpoint, "completion_window": window}
    answer = client.post("/v1/batches", json=body, **kwargs)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def wait_ended(client, batch_id, timeout_s=60, **kwargs):
    until(
        lambda: client.get(f"/v1/batches/{batch_id}", **kwargs).json()["status"] in ENDED, timeout_s
    )
    return client.get(f"/v1/batches/{batch_id}", **kwargs).json()


def results(client, file_id, **kwargs):
    content = client.get(f"/v1/files/{file_id}/content", **kwargs).content
    return [json.loads(line) for line in content.splitlines()]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    state = tmp_path_factory.mktemp("state")
    with asking("pixels", state_dir=state) as (server, client):
        yield server, client, state


def test_answers_are_those_of_the_endpoint_and_one_bad_request_stops_no_other(served):
    _, client, _ = served
    lines = request_lines(40)
    lines[7]["body"]["input"] = ["data:image/png;base64,AAAA"]
    batch = wait_ended(client, begin(client, to_jsonl(lines)))
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 40, "completed": 39, "failed": 1}
    output = client.get(f"/v1/files/{batch['output_file_id']}/content").content.splitlines()
    good = [line for number, line in enumerate(lines) if number != 7]
    for line, written in zip(good, output, strict=True):
        answer = client.post(ENDPOINT, json=line["body"])
        row = json.loads(written)
        assert (row["custom_id"], row["error"]) == (line["custom_id"], None)
        assert row["response"]["status_code"] == answer.status_code == 200
        assert b'"body":' + answer.content + b"}" in written
    (failed,) = results(client, batch["error_file_id"])
    answer = client.post(ENDPOINT, json=lines[7]["body"])
    assert failed["custom_id"] == "image 7"
    assert (failed["response"]["status_code"], failed["response"]["body"]) == (400, answer.json())


@pytest.mark.parametrize(
    ("change", "code", "line"),
    [
        (lambda lines: lines[1].update(custom_id="image 0"), "duplicate_custom_id", 2),
        (lambda lines: lines[2].update(url="/v1/labels"), "invalid_url", 3),
        (lambda lines: lines[0].update(method="GET"), "invalid_method", 1),
        (lambda lines: lines[0].pop("custom_id"), "invalid_custom_id", 1),
        (lambda lines: lines[2].update(body="text"), "invalid_body", 3),
        (lambda lines: lines.insert(1, "no object"), "invalid_json_line", 2),
        (lambda lines: lines[1]["body"].update(n=float("nan")), "invalid_json_line", 2),
        (lambda lines: lines.clear(), "empty_file", None),
    ],
)
def test_an_input_that_is_not_requests_fails_with_the_line(served, change, code, line):
    _, client, _ = served
    lines = request_lines(3)
    change(lines)
    batch = wait_ended(client, begin(client, to_jsonl(lines)))
    assert (batch["status"], batch["output_file_id"]) == ("failed", None)
    (fault,) = batch["errors"]["data"]
    assert (fault["code"], fault["line"]) == (code, line)


def png(seed):
    return base64.b64decode(data_uri(seed).partition(",")[2])


def pack_zip(images):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in images.items():
            archive.writestr(name, content)
    return out.getvalue()


def pack_tar(images):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in images.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def begin_images(client, content, filename="photos.zip", endpoint=ENDPOINT):
    file = client.post(
        "/v1/files", files={"file": (filename, content)}, data={"purpose": "images"}
    ).json()
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
    return client.post("/v1/batches", json=body)


@pytest.mark.parametrize("pack", [pack_zip, pack_tar])
def test_each_image_of_an_archive_is_a_request(served, pack):
    _, client, _ = served
    images = {f"día/{number}.png": png(number) for number in range(20)}
    images["día/bad.png"] = b"no image"
    content = pack(images)
    if pack is pack_zip:  # an entry whose bytes do not have its checksum cannot be read
        content = content.replace(images["día/3.png"][-30:-20], bytes(10))
        del images["día/3.png"]
    batch = wait_ended(client, begin_images(client, content).json()["id"])
    num_failed = 21 - len(images) + 1
    assert batch["request_counts"] == {
        "total": 21,
        "completed": 21 - num_failed,
        "failed": num_failed,
    }
    answers = {row["custom_id"]: row for row in results(client, batch["output_file_id"])}
    failed = {row["custom_id"]: row for row in results(client, batch["error_file_id"])}
    stem = "" if pack is pack_zip else ".png"  # a tar groups the files of a sample
    assert {*answers, *failed} == {name.removesuffix(stem) for name in [*images, "día/3.png"]}
    assert failed["día/bad.png".removesuffix(stem)]["response"]["status_code"] == 400
    if pack is pack_zip:
        assert failed["día/3.png"]["response"] is None
        assert failed["día/3.png"]["error"]["code"] == "unreadable"
    for number in (0, 4, 19):
        body = {"model": "pixels", "input": [data_uri(number)]}
        row = answers[f"día/{number}.png".removesuffix(stem)]
        assert row["response"]["body"] == client.post(ENDPOINT, json=body).json()


def label_lines():
    """Requests for labels, most of which can be answered together; some have an error."""
    bodies = [{"images": [data_uri(number)]} for number in range(20)]
    bodies[3] = {"images": ["data:image/png;base64,AAAA"]}
    bodies[5] = {"images": [data_uri(5), data_uri(6)]}
    bodies[9] = {"images": [7]}
    bodies[11] = {"images": [data_uri(11)], "texts": None}
    bodies[12] = {"images": []}
    bodies[14] = {"embeddings": [[1, "x"]]}
    bodies[15] = {'pictures "é"': [data_uri(15)]}
    bodies += [{"embeddings": [[1.0] * 8]}, {"embeddings": [[0.0] * 8]}] * 2
    return [
        {"custom_id": f"{number}", "method": "POST", "url": "/v1/labels", "body": body}
        for number, body in enumerate(bodies)
    ]


def num_counted(client):
    """The requests of today that are counted."""
    return sum(row["requests"] for row in client.get("/v1/usage").json()["data"])


def test_labels_have_the_bytes_that_each_request_gets_alone(journey, tmp_path):
    with asking(journey / "model", state_dir=tmp_path) as (_, client):
        lines = label_lines()
        dimension = client.get("/v1/info").json()["dimension"]
        for line in lines:
            if "embeddings" in line["body"] and len(line["body"]["embeddings"][0]) == 8:
                line["body"]["embeddings"] = [line["body"]["embeddings"][0][:1] * dimension]
        batch = wait_ended(client, begin(client, to_jsonl(lines), "/v1/labels"))
        written = {}
        for name in ("output_file_id", "error_file_id"):
            content = client.get(f"/v1/files/{batch[name]}/content").content
            written |= {json.loads(line)["custom_id"]: line for line in content.splitlines()}
        for line in lines:
            answer = client.post("/v1/labels", json=line["body"])
            expected = b'"status_code":%d,' % answer.status_code
            assert expected in written[line["custom_id"]], line
            body = answer.content
            if not answer.is_success:  # it names the request
                row = json.loads(written[line["custom_id"]])
                body = body.replace(
                    answer.headers["x-request-id"].encode(), row["response"]["request_id"].encode()
                )
            assert b'"body":' + body + b"}" in written[line["custom_id"]], line
        requests = {json.loads(line)["response"]["request_id"] for line in written.values()}
        assert len(requests) < len(lines)  # some were answered together

        images = {f"{number}.png": png(number) for number in range(18)} | {"bad.png": b"no image"}
        before = num_counted(client)
        ended = wait_ended(
            client, begin_images(client, pack_zip(images), endpoint="/v1/labels").json()["id"]
        )
        until(lambda: num_counted(client) == before + len(images), 10)
        output = client.get(f"/v1/files/{ended['output_file_id']}/content").content.splitlines()
        rows = [json.loads(line) for line in output]
        assert {row["custom_id"] for row in rows} == {*images}
        assert len({row["response"]["request_id"] for row in rows}) < len(rows)
        for row, written in zip(rows, output, strict=True):
            answer = client.post("/v1/labels", content=images[row["custom_id"]], headers=RAW)
            assert b'"body":' + answer.content + b"}" in written


def test_one_image_is_a_batch_under_the_name_of_its_file(served):
    _, client, _ = served
    batch = wait_ended(client, begin_images(client, png(1), "mine.png").json()["id"])
    (row,) = results(client, batch["output_file_id"])
    assert row["custom_id"] == "mine.png"


def test_what_a_batch_of_images_cannot_be(served):
    _, client, _ = served
    answer = begin_images(client, pack_zip({"a.png": png(0)}), endpoint="/v1/classify")
    assert answer.status_code == 400
    assert "must be for /v1/embeddings or /v1/labels" in answer.text
    ended = wait_ended(client, begin_images(client, pack_zip({"a.txt": b"text"})).json()["id"])
    assert (ended["status"], ended["errors"]["data"][0]["code"]) == ("failed", "empty_file")
    batch = wait_ended(client, begin_images(client, png(1), "mine.png").json()["id"])
    body = {
        "input_file_id": batch["output_file_id"],
        "endpoint": ENDPOINT,
        "completion_window": "24h",
    }
    answer = client.post("/v1/batches", json=body)
    assert answer.status_code == 400
    assert "purpose batch or images, got batch_output" in answer.text


def test_a_batch_over_a_file_that_is_deleted_fails(served):
    _, client, _ = served
    content = to_jsonl(request_lines(1))
    file_id = upload(client, content).json()["id"]
    assert client.delete(f"/v1/files/{file_id}").json()["deleted"] is True
    body = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
    answer = client.post("/v1/batches", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not-found")


def test_files_are_listed_described_sent_and_deleted(served):
    _, client, state = served
    content = random.Random(0).randbytes(300_000)
    file = client.post(
        "/v1/files",
        files={"file": ("ünï/../code.jsonl", content)},
        data={
            "purpose": "batch",
            "expires_after[anchor]": "created_at",
            "expires_after[seconds]": "3600",
        },
    ).json()
    assert file["sha256"] == hashlib.sha256(content).hexdigest()
    assert (file["bytes"], file["expires_at"] - file["created_at"]) == (300_000, 3600)
    assert client.get("/v1/files", params={"limit": 1}).json()["data"] == [file]
    assert client.get(f"/v1/files/{file['id']}").json() == file
    assert client.get(f"/v1/files/{file['id']}/content").content == content
    part = client.get(f"/v1/files/{file['id']}/content", headers={"Range": "bytes=5-9"})
    assert (part.status_code, part.content) == (206, content[5:10])
    client.delete(f"/v1/files/{file['id']}")
    assert client.get(f"/v1/files/{file['id']}").status_code == 404
    assert not (state / "files" / file["id"]).exists()


@pytest.mark.parametrize(
    ("files", "data", "param"),
    [
        ({"file": ("a", b"x")}, {"purpose": "fine-tune"}, "purpose"),
        ({"file": ("a", b"x")}, {}, "purpose"),
        ({"file": ("a", b"x")}, {"purpose": "batch", "color": "red"}, "color"),
        (
            {"file": ("a", b"x")},
            {"purpose": "batch", "expires_after[seconds]": "-1"},
            "expires_after",
        ),
        ({"image": ("a", b"x")}, {"purpose": "batch"}, None),
    ],
)
def test_a_form_that_is_wrong_is_refused_and_leaves_nothing(served, files, data, param):
    _, client, state = served
    before = stored(state)
    answer = client.post("/v1/files", files=files, data=data)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert stored(state) == before


def stored(state):
    return sorted(path.name for path in (state / "files").glob("file-*"))


def test_an_upload_that_breaks_off_leaves_nothing(served):
    server, client, state = served
    before = stored(state)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n"
        connection.sendall(
            (head + "Content-Type: multipart/form-data; boundary=x\r\n\r\n").encode()
        )
        disposition = 'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        connection.sendall(f"--x\r\n{disposition}".encode() + b"y" * 400_000)
        until(lambda: stored(state) != before, 10)
    until(lambda: stored(state) == before, 10)
    assert client.get("/v1/files").status_code == 200


def test_an_upload_in_parts_is_one_file(served):
    _, client, state = served
    before = stored(state)
    content = to_jsonl(request_lines(5))
    pieces = [content[:1000], content[1000:1001], content[1001:]]
    request = {"filename": "in.jsonl", "purpose": "batch", "bytes": len(content)}
    started = client.post("/v1/uploads", json=request).json()
    url = f"/v1/uploads/{started['id']}"
    lost = client.post(f"{url}/parts", files={"data": ("p", b"sent twice")}).json()["id"]
    part_ids = [
        client.post(f"{url}/parts", files={"data": ("p", piece)}).json()["id"]
        for piece in reversed(pieces)
    ][::-1]
    assert client.get("/v1/files").json()["data"] == [] or lost not in client.get("/v1/files").text
    for body in (
        {"part_ids": part_ids[:2]},
        {"part_ids": [*part_ids, "part_x"]},
        {"part_ids": part_ids, "md5": "0" * 32},
    ):
        assert client.post(f"{url}/complete", json=body).status_code == 422
    done = client.post(
        f"{url}/complete",
        json={"part_ids": part_ids, "md5": hashlib.md5(content).hexdigest()},
    ).json()
    assert done["status"] == "completed"
    assert client.get(f"/v1/files/{done['file']['id']}/content").content == content
    assert client.post(f"{url}/cancel").status_code == 409
    assert stored(state) == sorted([*before, done["file"]["id"]])  # the parts are gone
    other = client.post("/v1/uploads", json=request).json()["id"]
    client.post(f"/v1/uploads/{other}/parts", files={"data": ("p", b"x")})
    assert client.post(f"/v1/uploads/{other}/cancel").json()["status"] == "cancelled"
    assert stored(state) == sorted([*before, done["file"]["id"]])


def test_a_canceled_batch_keeps_its_answers(tmp_path):
    with asking("fake:latency_ms=50", engine="fake", max_batch=1, state_dir=tmp_path) as (
        _,
        client,
    ):
        lines = request_lines(400, model="fake:latency_ms=50")
        batch_id = begin(client, to_jsonl(lines))
        url = f"/v1/batches/{batch_id}"
        until(lambda: client.get(url).json()["request_counts"]["completed"] > 0, 30)
        assert client.post(f"{url}/cancel").json()["status"] in ("cancelling", "cancelled")
        batch = wait_ended(client, batch_id)
        counts = batch["request_counts"]
        assert batch["status"] == "cancelled"
        assert counts["completed"] + counts["failed"] == counts["total"] == 400
        answered = results(client, batch["output_file_id"])
        dropped = results(client, batch["error_file_id"])
        assert [row["custom_id"] for row in answered + dropped] == [
            line["custom_id"] for line in lines
        ]
        assert {row["error"]["code"] for row in dropped} == {"batch_cancelled"}
        assert client.post(f"{url}/cancel").json()["status"] == "cancelled"


def test_killed_servers_lose_no_answer_and_give_none_twice(tmp_path):
    model, rng = "fake:latency_ms=20", random.Random(1)
    server = Server(
        model, output=subprocess.DEVNULL, engine="fake", max_batch=2, state_dir=tmp_path
    )
    lines = request_lines(300, model=model)
    with httpx.Client(base_url=server.url, timeout=30) as client:
        server.wait_ready()
        batch_id = begin(client, to_jsonl(lines))
        for _ in range(4):
            time.sleep(rng.uniform(0.3, 0.9))
            server.process.kill()
            server.process.wait()
            server.start_again()
            server.wait_ready()
        batch = wait_ended(client, batch_id)
        assert batch["request_counts"] == {"total": 300, "completed": 300, "failed": 0}
        answered = results(client, batch["output_file_id"])
        assert [row["custom_id"] for row in answered] == [line["custom_id"] for line in lines]
        assert len({row["id"] for row in answered}) == 300
    server.stop()


def test_a_batch_whose_input_is_deleted_ends_and_keeps_its_answers(tmp_path):
    model = "fake:latency_ms=30"
    server = Server(
        model, output=subprocess.DEVNULL, engine="fake", max_batch=1, state_dir=tmp_path
    )
    with httpx.Client(base_url=server.url, timeout=30) as client:
        server.wait_ready()
        batch_id = begin(client, to_jsonl(request_lines(300, model=model)))
        url = f"/v1/batches/{batch_id}"
        until(lambda: client.get(url).json()["request_counts"]["completed"] > 0, 30)
        assert client.delete(f"/v1/files/{client.get(url).json()['input_file_id']}").json()
        server.process.kill()
        server.process.wait()
        server.start_again()
        server.wait_ready()
        batch = wait_ended(client, batch_id)
        counts = batch["request_counts"]
        assert (batch["status"], counts["total"]) == ("failed", 300)
        assert batch["errors"]["data"][0]["code"] == "missing_input"
        assert len(results(client, batch["output_file_id"])) == counts["completed"] > 0
    server.stop()


def new_key(keys, name, **options):
    return create_key(keys, name, now=datetime.now(UTC), **options)


def test_keys_have_files_quotas_and_turns_of_their_own(tmp_path):
    keys = tmp_path / "keys.json"
    ann, ann_token = new_key(keys, "ann", scopes=("jobs", "embed"))
    _, bob_token = new_key(keys, "bob", scopes=("jobs", "embed"))
    _, eve_token = new_key(keys, "eve", scopes=("embed",))
    ann_headers, bob_headers = ({"X-API-Key": token} for token in (ann_token, bob_token))
    model = "fake:latency_ms=20"
    limits = {"files__max_key_bytes": 2_000_000, "files__max_bytes": 2_200_000}
    settings = {"state_dir": tmp_path / "state", "auth__keys_file": keys, **limits}
    with asking(model, engine="fake", max_batch=2, files__batches_at_once=2, **settings) as (
        _,
        client,
    ):
        assert upload(client, b"x", headers={"X-API-Key": eve_token}).status_code == 403
        large = [
            begin(client, to_jsonl(request_lines(150, model=model)), headers=ann_headers)
            for _ in range(3)
        ]
        small = begin(client, to_jsonl(request_lines(4, model=model)), headers=bob_headers)
        # Bob's batch does not wait for Ann's three.
        assert wait_ended(client, small, headers=bob_headers)["status"] == "completed"
        state_of = lambda each: client.get(f"/v1/batches/{each}", headers=ann_headers).json()  # noqa: E731
        assert state_of(large[2])["status"] not in ENDED
        for path in ("/v1/files", "/v1/batches"):
            seen = {entry["id"] for entry in client.get(path, headers=bob_headers).json()["data"]}
            assert not seen & {*large}
        assert client.get(f"/v1/batches/{large[0]}", headers=bob_headers).status_code == 404
        refused = upload(client, b"x" * 2_000_001, headers=ann_headers)
        assert refused.status_code == 400  # 413 in OpenAI's dialect, whose clients lack a class
        assert refused.json()["error"]["code"] == "too-large"
        full = upload(client, b"x" * 1_990_000, headers=bob_headers)
        assert (full.status_code, full.json()["error"]["code"]) == (507, "insufficient-storage")
        revoke_key(keys, ann.id, now=datetime.now(UTC))
        until(lambda: client.get("/v1/files", headers=ann_headers).status_code == 401, 10)


def test_the_requests_of_a_revoked_key_are_refused(tmp_path):
    keys = tmp_path / "keys.json"
    ann, token = new_key(keys, "ann", scopes=("jobs", "embed"))
    new_key(keys, "bob", scopes=("jobs",))
    model = "fake:latency_ms=30"
    settings = {"state_dir": tmp_path / "state", "auth__keys_file": keys}
    with asking(model, engine="fake", max_batch=1, **settings) as (_, client):
        begin(client, to_jsonl(request_lines(200, model=model)), headers={"X-API-Key": token})
        revoke_key(keys, ann.id, now=datetime.now(UTC))
        errors = tmp_path / "state" / "files"
        until(
            lambda: any(
                b'"code":"unauthorized"' in path.read_bytes() for path in errors.glob("file-*")
            ),
            30,
        )


def test_a_server_without_a_state_directory_keeps_no_files():
    with asking("pixels") as (_, client):
        answer = client.get("/v1/files")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
        assert "--state" in answer.json()["error"]["message"]


def test_a_large_upload_takes_no_memory(served):
    server, client, state = served
    before = server.resident_mib()
    content = b"x" * 2**20

    def form():
        yield b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(200):
            yield content
        yield b"\r\n--b--\r\n"

    answer = client.post(
        "/v1/files", content=form(), headers={"Content-Type": "multipart/form-data; boundary=b"}
    )
    assert answer.json()["bytes"] == 200 * 2**20
    received = 0
    with client.stream("GET", f"/v1/files/{answer.json()['id']}/content") as sent:
        for piece in sent.iter_bytes():
            received += len(piece)
    assert received == 200 * 2**20
    assert server.resident_mib() < before + 40
    client.delete(f"/v1/files/{answer.json()['id']}")
    assert answer.json()["id"] not in stored(state)
