"""Jobs on uploaded images: from the upload to the files of their results."""

import csv
import io
import json
import os
import tarfile
import zipfile
from datetime import UTC, datetime

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlcd.client import Client, RefusedInput
from mlcd.service.keys.file import create_key
from tests.conftest import run_mlcd, write_digits
from tests.integration.bodies import files
from tests.integration.running import asking, serving

FORMATS = ["parquet", "csv", "jsonl", "coco", "zip"]
BROKEN = b"no image"


class Place:
    """A server that takes jobs on uploads, and its workers."""

    def __init__(self, server, client, model, state):
        self.server, self.client, self.model, self.state = server, client, model, state

    def upload(self, content, name="images.zip", purpose="images", **kwargs):
        return self.client.post(
            "/v1/files", files={"file": (name, content)}, data={"purpose": purpose}, **kwargs
        )

    def uploaded(self, content, name="images.zip", **kwargs):
        answer = self.upload(content, name, **kwargs)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    def submit(self, file_id, kind="label", key=None, **changes):
        headers = {} if key is None else {"Idempotency-Key": key}
        body = {"kind": kind, "input": {"file": file_id}, **changes}
        return self.client.post("/v1/jobs", json=body, headers=headers)

    def work(self, state=None, **environment):
        """Does all jobs that wait."""
        given = {**os.environ, "MLCD_JOBS__ROOTS": str(self.state), **environment}
        arguments = ("--model", self.model, "--state", state or self.state, "--drain")
        done = run_mlcd("worker", *arguments, env=given)
        assert done.returncode == 0, done.stderr
        return done

    def job(self, job_id):
        return self.client.get(f"/v1/jobs/{job_id}").json()

    def result(self, job_id, form):
        file_id = self.job(job_id)["results"][form]
        return self.client.get(f"/v1/files/{file_id}/content").content


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("digits"), 20)


@pytest.fixture(scope="module")
def place(journey, tmp_path_factory):
    state = tmp_path_factory.mktemp("state")
    (state / "pictures").mkdir()
    with asking(journey / "model", state_dir=state, jobs__roots=state) as (server, client):
        yield Place(server, client, journey / "model", state)


def zipped(folder, **more):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path in sorted(folder.rglob("*.png")):
            archive.write(path, path.relative_to(folder))
        for name, data in more.items():
            archive.writestr(name, data)
    return out.getvalue()


def test_each_result_has_the_labels_of_the_endpoint(place, scans):
    file_id = place.uploaded(zipped(scans, **{"broken ü.png": BROKEN}))
    job_id = place.submit(file_id, results=FORMATS, top=3).json()["id"]
    place.work()
    job = place.job(job_id)
    assert (job["state"], job["input"], job["output"]) == ("succeeded", file_id, None)
    assert (job["progress"]["images"], job["progress"]["failed_items"]) == (21, 1)
    assert list(job["results"]) == [*FORMATS, "errors"]

    paths = sorted(scans.rglob("*.png"))
    keys = [path.relative_to(scans).as_posix() for path in paths]
    sent = files(*[path.read_bytes() for path in paths])
    answer = place.client.post("/v1/labels?top=3", files=sent).json()["results"]
    expected = {
        key: [(label["id"], round(label["similarity"], 2)) for label in result["labels"]]
        for key, result in zip(keys, answer, strict=True)
    }

    table = pq.read_table(io.BytesIO(place.result(job_id, "parquet"))).to_pylist()
    assert expected == {
        row["key"]: [
            (id_, round(score, 2)) for id_, score in zip(row["ids"], row["scores"], strict=True)
        ]
        for row in table
    }
    lines = [*map(json.loads, place.result(job_id, "jsonl").splitlines())]
    assert {name for line in lines for label in line["labels"] for name in label} == {
        *answer[0]["labels"][0],
        "path",
    }
    assert expected == {
        line["key"]: [(label["id"], round(label["similarity"], 2)) for label in line["labels"]]
        for line in lines
    }
    rows = list(csv.DictReader(io.StringIO(place.result(job_id, "csv").decode())))
    read = {key: [] for key in keys}
    for row in rows:
        read[row["key"]].append((int(row["id"]), round(float(row["similarity"]), 2)))
    assert (read, [row["rank"] for row in rows[:3]]) == (expected, ["1", "2", "3"])
    coco = json.loads(place.result(job_id, "coco"))
    name_of = {image["id"]: image["file_name"] for image in coco["images"]}
    read = {key: [] for key in keys}
    for annotation in coco["annotations"]:
        score = round(annotation["score"], 2)
        read[name_of[annotation["image_id"]]].append((annotation["category_id"], score))
    assert read == expected
    ids = {id_ for labels in expected.values() for id_, _ in labels}
    assert {category["id"] for category in coco["categories"]} == ids
    with zipfile.ZipFile(io.BytesIO(place.result(job_id, "zip"))) as archive:
        names = archive.namelist()
        pictures = {archive.read(name) for name in names[1:]}
        clusters = sorted(int(name.split("/")[0].split()[0]) for name in names[1:])
        assert archive.read("labels.parquet")[:4] == b"PAR1"
    assert pictures == {path.read_bytes() for path in paths}
    assert clusters == sorted(labels[0][0] for labels in expected.values())
    (error,) = map(json.loads, place.result(job_id, "errors").splitlines())
    assert error["key"] == "broken ü.png"
    assert not list((place.state / "files").glob("job-*"))


def packed_tar(folder):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path in sorted(folder.rglob("*.png"), key=lambda path: path.name):
            archive.add(path, path.stem + ".png")
    return out.getvalue()


def packed_parquet(folder):
    out = io.BytesIO()
    images = [path.read_bytes() for path in sorted(folder.rglob("*.png"))]
    pq.write_table(pa.table({"image": images}), out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "content_of", "keys"),
    [
        ("digits.tar", packed_tar, [f"{number:04d}" for number in range(20)]),
        ("digits.parquet", packed_parquet, [f"{number:08d}" for number in range(20)]),
        ("a picture ü.png", lambda folder: next(folder.rglob("*.png")).read_bytes(), None),
    ],
)
def test_the_client_uploads_watches_and_downloads(
    place, scans, tmp_path, name, content_of, keys, monkeypatch
):
    monkeypatch.setattr("mlcd.client.batch_jobs._PART_BYTES", 1000)  # several parts
    path = tmp_path / name
    path.write_bytes(content_of(scans))
    with Client(place.server.url) as client:
        job = client.jobs.submit(client.jobs.upload(path), kind="embed", results=["jsonl"])
        place.work()
        *_, job = client.jobs.watch(job.id)
        (downloaded,) = client.jobs.download(job, tmp_path)
        lines = [json.loads(line) for line in downloaded.read_text().splitlines()]
        embedded = client.embed([scans / "0" / "0000.png"])
    assert downloaded.name == f"{path.stem}.jsonl"
    assert [line["key"] for line in lines] == (keys or [name])
    if keys and name.endswith("tar"):
        np.testing.assert_allclose(lines[0]["embedding"], embedded.vectors[0], atol=1e-6)


def test_refusals_name_what_is_required(place, scans):
    file_id = place.uploaded(zipped(scans))
    requests = place.uploaded(b"{}\n", "a.jsonl", purpose="batch")
    for changes, status, text in (
        ({"output": "/x"}, 400, "results are stored as files"),
        ({"kind": "curate"}, 400, "must be of kind label, embed or index"),
        ({"kind": "index"}, 400, "must be the name of the new collection"),
        ({"kind": "index", "output": "a/b"}, 422, "name"),
        ({"kind": "index", "output": "..", "results": None}, 422, "name"),
        ({"kind": "index", "output": "a", "results": ["csv"]}, 400, "writes its collection alone"),
        ({"kind": "embed", "results": ["csv"]}, 400, "parquet or jsonl, got csv"),
        ({"results": ["xml"]}, 400, "results"),
        ({"results": []}, 400, "results"),
        ({"url_column": "url"}, 400, "url_column"),
        ({"input": {"file": requests}}, 400, "purpose images, got batch"),
        ({"input": {"file": "file-0"}}, 404, "unknown file"),
        ({"input": {"file": "../../etc"}}, 404, "unknown file"),
        ({"input": str(place.state / "files" / file_id)}, 400, "output is required"),
        (
            {"input": str(place.state / "files" / file_id), "output": str(place.state / "o")},
            403,
            "input",
        ),
        ({"input": str(place.state), "output": str(place.state / "o")}, 403, "input"),
        (
            {"input": str(place.state / "pictures"), "output": str(place.state / "files" / "o")},
            403,
            "output",
        ),
    ):
        body = {"kind": "label", "input": {"file": file_id}} | changes
        answer = place.client.post("/v1/jobs", json=body)
        assert (answer.status_code, text in answer.text) == (status, True), answer.text
    before = sorted((place.state / "files").glob("file-*"))
    for content in (BROKEN, zipped(scans, **{"../a.png": b""})):
        assert place.upload(content).status_code == 422
    assert place.upload(zipped(scans), purpose="other").status_code == 400
    assert sorted((place.state / "files").glob("file-*")) == before


def test_an_upload_becomes_a_collection_that_the_server_searches(place, scans):
    content = packed_tar(scans)
    file_id = place.uploaded(content, "scans.tar")
    submitted = place.submit(file_id, kind="index", output="scans", key="scans").json()
    place.work()
    job = place.job(submitted["id"])
    assert (job["state"], job["output"], job["results"]) == ("succeeded", "scans", {})
    described = place.client.get("/v1/collections/scans").json()
    assert (described["items"], described["thumbnails"]["items"]) == (20, 20)
    picture = sorted(scans.rglob("*.png"))[3]
    answer = place.client.post(
        "/v1/collections/scans/search?top=1", files=files(picture.read_bytes())
    ).json()
    (match,) = answer["results"][0]["matches"]
    assert match["id"] == picture.stem
    assert not list((place.state / "files").glob("job-*"))
    again = place.submit(file_id, kind="index", output="scans", key="scans")
    assert (again.status_code, again.json()["id"]) == (200, job["id"])
    taken = place.submit(file_id, kind="index", output="scans")
    assert (taken.status_code, "the collection scans exists" in taken.text) == (409, True)

    (place.state / "scans.zip").write_bytes(zipped(scans))
    arguments = ("jobs", "submit", place.state / "scans.zip", "--url", place.server.url)
    options = ("--kind", "index", "--collection")
    assert run_mlcd(*arguments, *options, "by-command").returncode == 0
    refused = run_mlcd(*arguments, *options, "scans")
    assert (refused.returncode, "the collection scans exists" in refused.stderr) == (2, True)
    place.work()
    assert place.client.get("/v1/collections/by-command").json()["items"] == 20
    assert place.client.delete("/v1/collections/by-command").json()["outcome"] == "deleted"

    broken = place.uploaded(zipped(scans, **{"broken.png": BROKEN}))
    job_id = place.submit(broken, kind="index", output="more").json()["id"]
    place.work()
    (error,) = map(json.loads, place.result(job_id, "errors").splitlines())
    assert error["key"] == "broken.png"
    canceled = place.submit(broken, kind="index", output="none").json()["id"]
    place.client.delete(f"/v1/jobs/{canceled}")
    place.work()
    names = {path.name for path in (place.state / "collections").iterdir()}
    assert names == {"scans", "more"}


def test_a_key_of_idempotency_gives_the_job_of_the_first_request(place, scans):
    file_id = place.uploaded(zipped(scans))
    first = place.submit(file_id, kind="embed", key="k")
    again = place.submit(file_id, kind="embed", key="k")
    assert (first.status_code, again.status_code) == (202, 200)
    assert first.json()["id"] == again.json()["id"]
    assert place.submit(file_id, kind="embed", key="k", results=["jsonl"]).status_code == 409
    place.work()
    assert place.job(first.json()["id"])["state"] == "succeeded"


def test_a_worker_that_does_not_see_the_files_leaves_the_job_to_others(place, scans, tmp_path):
    job_id = place.submit(place.uploaded(zipped(scans)), kind="embed").json()["id"]
    (tmp_path / "jobs").symlink_to(place.state / "jobs")  # the queue alone
    place.work(state=tmp_path)
    assert place.job(job_id)["problem"]["code"] == "other-files"
    place.work()
    job = place.job(job_id)
    assert (job["state"], job["problem"]) == ("succeeded", None)


def test_a_deleted_file_fails_its_job_and_a_canceled_one_leaves_nothing(place, scans):
    file_id = place.uploaded(zipped(scans))
    deleted, canceled = (place.submit(file_id, kind="embed").json()["id"] for _ in range(2))
    place.client.delete(f"/v1/files/{file_id}")
    place.client.delete(f"/v1/jobs/{canceled}")
    place.work()
    assert place.job(deleted)["state"] == "failed"
    assert place.job(deleted)["problem"]["code"] in ("not-found", "input-changed")
    assert place.job(canceled)["state"] == "canceled"
    assert not list((place.state / "files").glob("job-*"))


def test_results_count_for_their_owner_alone(journey, scans, tmp_path):
    keys = tmp_path / "keys.json"
    tokens = [create_key(keys, "n", scopes=["jobs"], now=datetime.now(UTC))[1] for _ in range(2)]
    content = zipped(scans)
    state = tmp_path / "state"
    given = {
        "state_dir": state,
        "jobs__roots": tmp_path,
        "auth__keys_file": keys,
        "files__max_key_bytes": len(content) + 4000,
    }
    with serving(journey / "model", **given) as server:
        clients = [
            httpx.Client(base_url=server.url, headers={"X-API-Key": token}) for token in tokens
        ]
        places = [Place(server, client, journey / "model", state) for client in clients]
        file_id = places[0].uploaded(content)
        assert places[1].submit(file_id).status_code == 404
        job_id = places[0].submit(file_id, kind="embed", results=["jsonl"]).json()["id"]
        limits = {"MLCD_FILES__MAX_KEY_BYTES": str(given["files__max_key_bytes"])}
        places[0].work(**limits)
        job = places[0].job(job_id)
        assert (job["state"], job["problem"]["code"]) == ("failed", "too-large")
        assert places[0].client.post(f"/v1/jobs/{job_id}/retry").status_code == 200
        places[0].work()  # with the larger default
        result = places[0].job(job_id)["results"]["jsonl"]
        assert places[1].client.get(f"/v1/files/{result}").status_code == 404
        listed = places[0].client.get("/v1/files?purpose=job_output").json()["data"]
        assert [file["id"] for file in listed] == [result]
        for client in clients:
            client.close()


def test_the_command_uploads_and_downloads(place, scans, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "digits.zip").write_bytes(zipped(scans))
    submit = ("jobs", "submit", tmp_path / "in" / "digits.zip", "--url", place.server.url)
    submitted = run_mlcd(*submit, "--results", "csv,zip", cwd=tmp_path)
    assert submitted.returncode == 0, submitted.stderr
    job_id = submitted.stdout.strip()
    early = run_mlcd("jobs", "download", job_id, "--url", place.server.url, cwd=tmp_path)
    assert (early.returncode, "must be a job on uploaded images" in early.stderr) == (2, True)
    place.work()
    done = run_mlcd("jobs", "download", job_id, "--url", place.server.url, cwd=tmp_path)
    assert (done.returncode, done.stdout.split()) == (0, ["digits.csv", "digits.zip"])
    assert {path.name for path in tmp_path.iterdir()} == {"in", "digits.csv", "digits.zip"}
    for arguments, text in (
        ((tmp_path / "in", "--url", place.server.url), "pack a folder"),
        ((*submit[2:], "--results", "xml"), "formats must be of"),
    ):
        refused = run_mlcd("jobs", "submit", *arguments, cwd=tmp_path)
        assert (refused.returncode, text in refused.stderr) == (2, True), refused.stderr
    with Client(place.server.url) as client, pytest.raises(RefusedInput, match="neither an image"):
        path = tmp_path / "in" / "text.zip"
        path.write_text("no image")
        client.jobs.upload(path)
