"""The drill of docs/how-to/backup.md, and a server whose state is damaged."""

import shutil
import threading

import httpx
import numpy as np

from mlcd.collections.store import Collections
from mlcd.types import unit_rows
from tests.conftest import call_mlcd, write_digits
from tests.integration.running import asking, until


def test_a_backup_under_three_writers_is_restored_and_served(journey, tmp_path):
    state, ended = tmp_path / "state", threading.Event()
    acknowledged: list[list[str]] = [[], [], []]
    settings = {"jobs__roots": tmp_path / "root"}
    images = write_digits(tmp_path / "root" / "images", 3)
    job = {"kind": "embed", "input": str(images), "output": str(tmp_path / "root" / "out")}
    with asking(journey / "model", state_dir=state, **settings) as (server, client):
        dimension = client.get("/v1/info").json()["dimension"]
        rows = unit_rows(np.random.default_rng(0).standard_normal((50, dimension))).tolist()
        assert client.put("/v1/collections/photos").status_code == 201
        assert client.patch("/v1/centers/1", json={"name": "kept"}).status_code == 200
        submitted = client.post("/v1/jobs", json=job).json()["id"]

        def write(writer):
            with httpx.Client(base_url=server.url, timeout=30) as own:
                while not ended.is_set():
                    start = len(acknowledged[writer])
                    ids = [f"{writer}/{n}" for n in range(start, start + 10)]
                    items = [
                        {"id": item_id, "embedding": rows[n], "metadata": {"of": writer}}
                        for n, item_id in enumerate(ids)
                    ]
                    answer = own.post("/v1/collections/photos/items", json={"items": items})
                    answer.raise_for_status()
                    acknowledged[writer] += ids

        writers = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
        for thread in writers:
            thread.start()
        try:
            until(lambda: all(acknowledged), 30)
            before = {item_id for ids in acknowledged for item_id in list(ids)}
            done = call_mlcd("backup", state, tmp_path / "backup")
        finally:
            ended.set()
            for thread in writers:
                thread.join()
    assert done.returncode == 0, done.stderr
    done = call_mlcd("restore", tmp_path / "backup", tmp_path / "restored")
    assert done.returncode == 0, done.stderr
    with asking(journey / "model", state_dir=tmp_path / "restored", **settings) as (server, client):
        listed = client.get("/v1/collections").json()
        assert (listed["collections"][0]["items"] % 10, listed["unusable"]) == (0, [])
        assert client.get("/v1/centers/1").json()["name"] == "kept"
        assert client.get(f"/v1/jobs/{submitted}").json()["state"] == "queued"
    with Collections.open(tmp_path / "restored" / "collections") as store:
        held = {item.id for block in store.get("photos").items() for item in block}
    assert before <= held <= {item_id for ids in acknowledged for item_id in ids}


def test_a_server_with_a_damaged_state_serves_the_rest_and_says_what_is_damaged(
    journey, new_state, tmp_path
):
    state = new_state()
    names = sorted(path.name for path in (state / "collections").iterdir() if path.is_dir())
    shutil.copytree(state / "collections" / names[0], state / "collections" / "torn")
    (state / "collections" / "torn" / "items.sqlite").write_bytes(b"no ledger" * 1000)
    model = shutil.copytree(journey / "model", tmp_path / "model")
    (model / "centers" / "given-names.json").write_text("{")
    (state / "jobs").mkdir()
    (state / "jobs" / "queue.sqlite").write_bytes(b"no queue" * 1000)
    settings = {"state_dir": state, "jobs__roots": tmp_path}
    with asking(model, **settings) as (server, client):
        listed = client.get("/v1/collections").json()
        assert [each["name"] for each in listed["collections"]] == names
        reason = "torn/items.sqlite is damaged: restore it with `mlcd restore`"
        assert listed["unusable"] == [{"name": "torn", "reason": reason}]
        for method, path in (("GET", ""), ("PUT", ""), ("GET", "/items/x"), ("POST", "/search")):
            body = {"json": {"ids": ["x"]}} if method == "POST" else {}
            refused = client.request(method, f"/v1/collections/torn{path}", **body)
            assert refused.status_code == 409, refused.text
            assert refused.json()["type"] == "urn:mlcd:problem:collection-unusable"
            assert reason in refused.json()["detail"]
        renamed = client.patch("/v1/centers/1", json={"name": "cat"})
        assert (renamed.status_code, "given-names.json is damaged" in renamed.text) == (409, True)
        assert client.get("/v1/centers?limit=1").status_code == 200
        jobs = client.get("/v1/jobs")
        assert (jobs.status_code, jobs.json()["type"]) == (503, "urn:mlcd:problem:unavailable")
        assert "queue is damaged" in jobs.text
        assert str(tmp_path) not in jobs.text + renamed.text
        assert server.metric("mlcd_collections_unusable") == 1
        assert server.metric("mlcd_job_queue_up") == 0
        until(lambda: server.metric("mlcd_center_names_damaged") == 1, 10)
        (state / "jobs" / "queue.sqlite").unlink()
        assert client.get("/v1/jobs").json()["jobs"] == []
        (model / "centers" / "given-names.json").unlink()
        assert client.patch("/v1/centers/1", json={"name": "cat"}).status_code == 200
    assert not (model / "centers" / "given-names.json").exists()
