"""Thumbnails over HTTP: made with the item, kept by browsers, gone with it, and of nobody else."""

import io
import json
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import httpx
import pytest
from PIL import Image

from tests.hostile import encoded
from tests.integration.bodies import files
from tests.integration.running import Server, asking

IDS = ["sea/1.png", "Häuser/Straße 7.jpg", "写真/桜.jpg", "a/thumbnail", "a", "thumbnail"]


def colored(number, size=(400, 300)):
    image = Image.new("RGB", size, (40 * number % 256, 200, 255 - 17 * number))
    image.paste((0, 0, 0), (10 * number + 10, 20, 200, 100 + 5 * number))
    return encoded(image, "JPEG")


@pytest.fixture
def gallery(client):
    path = "/v1/collections/gallery"
    assert client.put(path).status_code == 201
    yield path
    client.delete(path)


def add(client, path, images, **metadata):
    given = json.dumps([{"id": item_id, "metadata": metadata} for item_id in images])
    answer = client.post(f"{path}/items", files=files(*images.values()), data={"items": given})
    assert answer.status_code == 200, answer.text
    return answer.json()


def at(path, item_id, **params):
    url = f"{path}/items/{quote(item_id, safe='')}/thumbnail"
    return url + "".join(f"?{name}={value}" for name, value in params.items())


def test_every_id_has_its_own(client, gallery):
    images = {item_id: colored(n) for n, item_id in enumerate(IDS)}
    answer = add(client, gallery, images)
    versions = {result["id"]: result["thumbnail"] for result in answer["results"]}
    assert len(set(versions.values())) == len(IDS)
    assert answer["thumbnails"]["items"] == len(IDS)
    for item_id in IDS:
        found = client.get(at(gallery, item_id))
        assert found.status_code == 200
        assert found.headers["etag"] == f'"{versions[item_id]}"'
        picture = Image.open(io.BytesIO(found.content))
        assert (picture.format, picture.size) == ("WEBP", (160, 120))
        item = client.get(f"{gallery}/items/{quote(item_id, safe='')}").json()
        assert (item["id"], item["thumbnail"]) == (item_id, versions[item_id])
    # a slash that stays: the last step is the thumbnail of what stands before it
    shown = client.get(f"{gallery}/items/sea/1.png/thumbnail").headers["etag"].strip('"')
    assert shown == versions["sea/1.png"]
    assert client.get(f"{gallery}/items/a/thumbnail").headers["etag"].strip('"') == versions["a"]
    assert client.get(f"{gallery}/items/a%2Fthumbnail").json()["id"] == "a/thumbnail"
    for method in ("PATCH", "DELETE", "PUT"):
        refused = client.request(method, f"{gallery}/items/a/thumbnail")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET")
    found = client.post(f"{gallery}/search", json={"ids": IDS, "top": 6}).json()
    for result in found["results"]:
        assert {m["id"]: m["thumbnail"] for m in result["matches"]} == versions
    groups = client.post(f"{gallery}/duplicates", json={"similarity": -1}).json()["groups"]
    assert dict(zip(groups[0]["ids"], groups[0]["thumbnails"], strict=True)) == versions
    assert groups[0]["metadata"] == [{}] * len(IDS)


def test_copies_are_found_by_their_pictures(client, gallery, shared_data):
    files = sorted((shared_data / "caltech101_20").rglob("*.jpg"))[::40]
    photographs = {f"{n}.jpg": path.read_bytes() for n, path in enumerate(files)}
    add(client, gallery, photographs)
    lonely = client.post(f"{gallery}/duplicates", json={}).json()
    assert (lonely["groups"], len(lonely["nearest"]["ids"])) == ([], 2)
    with Image.open(io.BytesIO(photographs["3.jpg"])) as image:
        half = image.convert("RGB").resize((image.width // 2, image.height // 2))
    add(client, gallery, {"half.jpg": encoded(half, "JPEG")})
    found = client.post(f"{gallery}/duplicates").json()
    assert [sorted(group["ids"]) for group in found["groups"]] == [["3.jpg", "half.jpg"]]
    assert (found["similarity"], found["nearest"]) == (None, None)
    alike = client.post(f"{gallery}/duplicates", json={"similarity": 1}).json()
    assert (alike["groups"], len(alike["nearest"]["ids"])) == ([], 2)


def test_browsers_keep_the_version_and_ask_about_the_rest(client, gallery):
    version = add(client, gallery, {"p": colored(1)})["results"][0]["thumbnail"]
    kept = client.get(at(gallery, "p", v=version))
    assert kept.headers["content-type"] == "image/webp"
    assert kept.headers["cache-control"] == "private, max-age=31536000, immutable"
    assert kept.headers["x-content-type-options"] == "nosniff"
    assert kept.headers["content-security-policy"].startswith("default-src 'none'")
    for other in ({}, {"v": "0" * 16}):
        assert client.get(at(gallery, "p", **other)).headers["cache-control"] == "private, no-cache"
    for tags in (f'"{version}"', f'"x", W/"{version}"'):
        unchanged = client.get(at(gallery, "p"), headers={"If-None-Match": tags})
        assert (unchanged.status_code, unchanged.content) == (304, b"")
    assert client.get(at(gallery, "p"), headers={"If-None-Match": '"x"'}).status_code == 200
    assert client.head(at(gallery, "p")).status_code == 200


def test_there_is_none_of_embeddings_nor_of_what_is_deleted(client, gallery, picture):
    add(client, gallery, {"p": colored(1), "q": colored(2)})
    row = picture[2].tolist()
    body = {"items": [{"id": "e", "embedding": row}, {"id": "q", "embedding": row}]}
    results = client.post(f"{gallery}/items", json=body).json()["results"]
    assert [result["thumbnail"] for result in results] == [None, None]
    deleted = client.post(f"{gallery}/delete", json={"ids": ["p", "nobody"]}).json()
    assert [result["outcome"] for result in deleted["results"]] == ["deleted", "missing"]
    for item_id in ("e", "q", "p", "nobody"):
        missing = client.get(at(gallery, item_id))
        assert (missing.status_code, missing.json()["type"]) == (404, "urn:mlcd:problem:not-found")
    stored = client.get(gallery).json()["thumbnails"]
    assert (stored["items"], stored["pictures"], stored["bytes"]) == (0, 0, 0)


def test_the_same_image_again_from_the_cache_has_one_too(client, gallery):
    image = colored(5)
    first = add(client, gallery, {"p": image})["results"][0]
    second = add(client, gallery, {"q": image})["results"][0]
    assert first["thumbnail"] == second["thumbnail"] is not None
    assert client.get(gallery).json()["thumbnails"]["pictures"] == 1


def test_the_bound_and_the_switch(journey, tmp_path):
    bound = {"thumbnails__max_bytes": 900, "thumbnails__side": 64}
    with asking(journey / "model", state_dir=tmp_path, **bound) as (_, client):
        client.put("/v1/collections/c")
        answer = add(client, "/v1/collections/c", {f"i{n}": colored(n) for n in range(6)})
        kept = [result for result in answer["results"] if result["thumbnail"]]
        assert {result["outcome"] for result in answer["results"]} == {"created"}
        assert 0 < len(kept) < 6
        stored = client.get("/v1/collections/c").json()["thumbnails"]
        assert stored == answer["thumbnails"]
        assert (stored["items"], stored["max_bytes"], stored["full"]) == (len(kept), 900, True)
        assert stored["bytes"] <= 900
        small = client.get(at("/v1/collections/c", kept[0]["id"]))
        assert max(Image.open(io.BytesIO(small.content)).size) == 64
    with asking(journey / "model", state_dir=tmp_path, thumbnails__enabled=False) as (
        _running,
        client,
    ):
        assert client.get(at("/v1/collections/c", kept[0]["id"])).content == small.content
        answer = add(client, "/v1/collections/c", {"new": colored(9)})
        assert answer["results"][0]["thumbnail"] is None


def test_after_kill_9_while_adding_every_answered_item_has_its_own(journey, tmp_path):
    server = Server(journey / "model", state_dir=tmp_path).wait_ready()
    path, answered = "/v1/collections/c", {}
    with httpx.Client(base_url=server.url, timeout=30) as client:
        client.put(path)

        def add_some(start):
            for n in range(start, start + 1000):
                try:
                    answer = add(client, path, {f"i{n}": colored(n)})
                except httpx.TransportError:
                    return
                answered[f"i{n}"] = answer["results"][0]["thumbnail"]
                if len(answered) == 40:
                    server.process.kill()

        with ThreadPoolExecutor(3) as pool:
            [*pool.map(add_some, (0, 1000, 2000))]
    server.process.communicate(timeout=20)
    assert len(answered) >= 40
    with asking(journey / "model", state_dir=tmp_path) as (_, client):
        for item_id, version in answered.items():
            assert client.get(at(path, item_id)).headers["etag"] == f'"{version}"'
