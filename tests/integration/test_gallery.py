"""The questions of a page of clusters and of a map: centers with members, and a layout."""

import csv
import io
from urllib.parse import quote

import numpy as np
import pyarrow.parquet as pq
import pytest

from mlcd.client import Client, RefusedNotFound

DEMO = {"collection": "demo"}


@pytest.fixture(scope="module")
def centers(client):
    answer = client.get("/v1/centers", params={**DEMO, "limit": 500})
    assert answer.status_code == 200, answer.text
    return answer.json()


def pages(client, path, field, **params):
    cursor, found = None, []
    while True:
        page = client.get(path, params={**params, **({"cursor": cursor} if cursor else {})}).json()
        found += page[field]
        if (cursor := page["next"]) is None:
            return found, page["total"]


def test_every_item_is_a_member_of_the_center_that_is_its_label(client, centers, digits):
    described = client.get("/v1/collections/demo").json()
    assert sum(center["members"] for center in centers["centers"]) == described["items"]
    center = centers["centers"][0]
    members, total = pages(
        client, f"/v1/centers/{center['id']}/members", "members", **DEMO, limit=3
    )
    assert len(members) == total == center["members"] > 3
    assert len({member["id"] for member in members}) == total
    similarities = [member["similarity"] for member in members]
    assert similarities == sorted(similarities, reverse=True)
    assert center["spread"] == pytest.approx(1 - np.mean(similarities), abs=1e-6)
    first = members[0]
    row = client.get(
        f"/v1/collections/demo/items/{quote(first['id'], safe='')}", params={"embedding": True}
    ).json()
    assert row["metadata"] == first["metadata"]
    label = client.post("/v1/labels?top=1", json={"embeddings": [row["embedding"]]}).json()
    (nearest,) = label["results"][0]["labels"]
    assert nearest["id"] == center["id"]
    assert nearest["similarity"] == pytest.approx(first["similarity"], abs=1e-5)
    shown = [example["id"] for example in center["examples"]]
    assert shown == [member["id"] for member in members[: len(shown)]]
    assert "demo" in client.get(f"/v1/centers/{center['id']}").json()["collections"]
    whole = client.get(f"/v1/centers/{center['id']}", params=DEMO).json()
    assert centers["novelty_from"] == "collection"
    novel = sum(
        center["novelty"] * center["members"] for center in centers["centers"] if center["members"]
    )
    assert novel / described["items"] == pytest.approx(0.05, abs=0.01)
    picture = client.get(
        f"/v1/collections/demo/items/{quote(first['id'], safe='')}/thumbnail",
        params={"v": first["thumbnail"]},
    )
    assert picture.headers["cache-control"].endswith("immutable")
    for field in ("members", "spread", "novelty", "size", "name"):
        assert whole[field] == center[field]


@pytest.mark.parametrize("sort", ["size", "members", "name", "spread", "novelty", "id"])
@pytest.mark.parametrize("descending", [True, False])
def test_pages_of_any_order_are_the_whole_list(client, centers, sort, descending):
    found, total = pages(
        client, "/v1/centers", "centers", **DEMO, sort=sort, descending=descending, limit=4
    )
    assert total == len(found) == centers["total"]
    assert {center["id"] for center in found} == {center["id"] for center in centers["centers"]}
    values = [center[sort] for center in found if center[sort] is not None]
    assert values == sorted(values, reverse=descending)
    unknown = [center[sort] is None for center in found]
    assert unknown == sorted(unknown)


def test_filters_of_the_list(client, centers):
    name = next(center["name"] for center in centers["centers"] if center["name"])
    found = client.get("/v1/centers", params={"name": name.upper(), "limit": 500}).json()
    assert found["total"] > 0
    assert all(name in center["name"] for center in found["centers"])
    assert {center["members"] for center in found["centers"]} == {None}
    assert found["centers"][0]["examples"][0]["collection"] is None
    sizes = sorted(center["size"] for center in centers["centers"])
    middle = sizes[len(sizes) // 2]
    some = client.get("/v1/centers", params={"min_size": middle, "max_size": middle}).json()
    assert some["total"] == sizes.count(middle)
    few = client.get("/v1/centers", params={**DEMO, "max_members": 0}).json()
    assert all(center["members"] == 0 and center["spread"] is None for center in few["centers"])


@pytest.mark.parametrize(
    ("params", "status"),
    [
        ({"collection": "nobody"}, 404),
        ({"collection": "../x"}, 422),
        ({"sort": "spread"}, 422),
        ({"min_members": 1}, 422),
        ({"sort": "color"}, 400),
        ({"limit": 0}, 400),
        ({"limit": 501}, 400),
        ({"examples": 13}, 400),
        ({"cursor": "!"}, 422),
        ({"cursor": "WzFd" * 9}, 422),
        ({"cursor": "WzEuNV0"}, 422),
    ],
)
def test_what_cannot_be_listed(client, params, status):
    assert client.get("/v1/centers", params=params).status_code == status


def test_members_of_what_is_not_there(client):
    path = "/v1/centers/0/members"
    assert client.get(path).status_code == 400
    assert client.get(path, params={"collection": "nobody"}).status_code == 404
    assert client.get("/v1/centers/100000/members", params=DEMO).status_code == 404
    assert client.get(path, params={**DEMO, "cursor": "WzFd"}).status_code == 422


def test_values_of_members_add_up(client, centers):
    for center in centers["centers"][:3]:
        answer = client.get(
            f"/v1/centers/{center['id']}/values", params={**DEMO, "field": "class_name", "limit": 2}
        ).json()
        nums = [count["items"] for count in answer["counts"]]
        assert nums == sorted(nums, reverse=True)
        assert sum(nums) + answer["others"] + answer["missing"] == center["members"]
    first = centers["centers"][0]
    absent = client.get(f"/v1/centers/{first['id']}/values", params={**DEMO, "field": "colour"})
    assert absent.json()["counts"] == []
    assert absent.json()["missing"] == first["members"]


def layout_of(client, path="/v1/collections/demo/layout", **params):
    answer = client.get(path, params=params)
    assert answer.status_code == 200, answer.text
    return answer, np.frombuffer(answer.content, "<f4").reshape(-1, 2)


def test_the_layout_has_a_point_for_every_item(client):
    answer, points = layout_of(client)
    num = client.get("/v1/collections/demo").json()["items"]
    assert answer.headers["x-mlcd-items"] == str(num) == str(len(points))
    assert answer.headers["x-mlcd-layout"].startswith("pca;")
    assert answer.headers["content-length"] == str(8 * num)
    assert np.abs(points).max() <= 1
    first, some = layout_of(client, first=7)
    assert some.tolist() == points[:7].tolist()
    assert first.headers["x-mlcd-items"] == "7"
    again = client.get(
        "/v1/collections/demo/layout", headers={"If-None-Match": answer.headers["etag"]}
    )
    assert (again.status_code, again.content) == (304, b"")


def test_values_and_legend_are_those_of_the_items(client, centers):
    answer, points = layout_of(client)
    path = "/v1/collections/demo/layout"
    body = {"limit": 10_000, "layout": answer.headers["x-mlcd-layout"].split(";")[1]}
    items = client.post(f"{path}/items", json=body).json()
    assert items["total"] == len(points)
    assert [item["position"] for item in items["items"]] == [*range(len(points))]
    by_field = client.get(f"{path}/values", params={"by": "metadata.class_name"}).content
    legend = client.get(f"{path}/legend", params={"by": "metadata.class_name"}).json()["values"]
    names = {entry["index"]: entry["value"] for entry in legend}
    shown = [names[number] for number in np.frombuffer(by_field, "<i4").tolist()]
    assert shown == [item["metadata"]["class_name"] for item in items["items"]]
    assert [entry["items"] for entry in legend] == [shown.count(entry["value"]) for entry in legend]
    numbers = np.frombuffer(client.get(f"{path}/values", params={"by": "cluster"}).content, "<i4")
    for center in centers["centers"]:
        assert (numbers == center["id"]).sum() == center["members"]
    legend = client.get(f"{path}/legend", params={"by": "cluster"}).json()["values"]
    assert {entry["value"]: (entry["items"], entry["name"]) for entry in legend} == {
        center["id"]: (center["members"], center["name"])
        for center in centers["centers"]
        if center["members"]
    }


def test_a_lasso_chooses_counts_and_exports(client):
    _, points = layout_of(client)
    path = "/v1/collections/demo/layout/items"
    corners = [[-1.1, -1.1], [0.0, -1.1], [0.0, 1.1], [-1.1, 1.1]]
    inside = np.flatnonzero(points[:, 0] < 0)
    found = client.post(path, json={"polygon": corners, "limit": 5}).json()
    assert found["total"] == len(inside)
    assert [item["position"] for item in found["items"]] == inside[:5].tolist()
    filter_ = {"field": "class_name", "eq": found["items"][0]["metadata"]["class_name"]}
    fewer = client.post(path, json={"polygon": corners, "filter": filter_}).json()
    assert 0 < fewer["total"] < found["total"]
    text = client.post(path, json={"polygon": corners}, headers={"Accept": "text/csv"})
    assert text.headers["content-type"].startswith("text/csv")
    assert text.headers["content-disposition"] == 'attachment; filename="demo.csv"'
    rows = list(csv.DictReader(io.StringIO(text.text)))
    assert [int(row["position"]) for row in rows] == inside.tolist()
    kind = {"Accept": "application/vnd.apache.parquet"}
    parquet = client.post(path, json={"polygon": corners}, headers=kind)
    table = pq.read_table(io.BytesIO(parquet.content))
    assert table["id"].to_pylist() == [row["id"] for row in rows]
    assert table["x"].to_pylist() == pytest.approx(points[inside, 0].tolist())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"positions": [0], "polygon": [[0, 0], [1, 0], [1, 1]]}, 422),
        ({"positions": [10**9]}, 422),
        ({"positions": [-1]}, 400),
        ({"polygon": [[0, 0], [1, 1]]}, 400),
        ({"polygon": [[0, 0, 0]] * 3}, 400),
        ({"layout": "0" * 16}, 409),
        ({"filter": {"field": "class_name", "eq": 2**53 + 1}}, 422),
        ({"filter": {"field": "class_name", "like": 1}}, 422),
        ({"positions": [0.5]}, 400),
        ({"positions": ["0"]}, 400),
        ({"limit": True}, 400),
    ],
)
def test_what_cannot_be_chosen(client, body, status):
    assert client.post("/v1/collections/demo/layout/items", json=body).status_code == status


def test_what_a_layout_does_not_know(client):
    path = "/v1/collections/demo/layout"
    assert client.get(f"{path}/values").status_code == 400
    for by in ("colour", "metadata."):
        assert client.get(f"{path}/values", params={"by": by}).status_code == 422
    absent = {"by": "metadata.colour"}
    assert set(np.frombuffer(client.get(f"{path}/values", params=absent).content, "<i4")) == {-1}
    assert client.get(f"{path}/legend", params=absent).json()["values"] == []
    only = {"positions": [0.0], "limit": 1.0, "filter": {"field": "colour", "eq": 1}}
    expected = {"collection": "demo", "total": 0, "items": []}
    assert client.post(f"{path}/items", json=only).json() == expected
    assert client.get("/v1/collections/nobody/layout").status_code == 404


def test_a_collection_that_changes_and_an_empty_one(client, picture):
    path = "/v1/collections/changing"
    client.put(path)
    try:
        assert layout_of(client, f"{path}/layout")[1].shape == (0, 2)
        row = picture[2].tolist()
        for name in ("Straße 7.jpg", "写真/桜.jpg"):
            client.post(f"{path}/items", json={"items": [{"id": name, "embedding": row}]})
        assert len(layout_of(client, f"{path}/layout")[1]) == 2
        items = client.post(f"{path}/layout/items", json={}).json()["items"]
        assert {item["id"] for item in items} == {"Straße 7.jpg", "写真/桜.jpg"}
        text = client.post(f"{path}/layout/items", json={}, headers={"Accept": "text/csv"})
        assert "写真/桜.jpg" in text.content.decode()
        formulas = ['=HYPERLINK("x")', "+1", "-1,2", "@a", "'=1"]
        added = [{"id": name, "embedding": row} for name in formulas]
        client.post(f"{path}/items", json={"items": added})
        files = [
            client.post(f"{path}/layout/items", json={}, headers={"Accept": kind}).content
            for kind in ("text/csv", "application/vnd.apache.parquet")
        ]
        shown = {line["id"] for line in csv.DictReader(io.StringIO(files[0].decode()))}
        assert shown >= {*(f"'{name}" for name in formulas[:4]), "'=1"}
        assert set(pq.read_table(io.BytesIO(files[1]))["id"].to_pylist()) >= {*formulas}
        client.post(f"{path}/delete", json={"ids": formulas})
        only = client.get("/v1/centers", params={"collection": "changing"}).json()["centers"][0]
        assert only["members"] == 2
        of_center = f"/v1/centers/{only['id']}/members?collection=changing"
        members = client.get(of_center).json()["members"]
        assert [member["id"] for member in members] == ["Straße 7.jpg", "写真/桜.jpg"]
        client.delete(f"{path}/items/{quote('写真/桜.jpg', safe='')}")
        again = client.get("/v1/centers", params={"collection": "changing"}).json()["centers"][0]
        assert again["members"] == 1
    finally:
        client.delete(path)


def test_less_like_this_moves_the_matches(client):
    search = "/v1/collections/demo/search"

    def matches(**asked):
        found = client.post(search, json=asked).json()["results"][0]["matches"]
        return [match["id"] for match in found]

    ids = matches(embeddings=[row(client)], top=5)
    moved = matches(id=ids[0], top=400, without={"ids": [ids[-1]], "weight": 0.9})
    assert moved.index(ids[-1]) > matches(id=ids[0], top=400).index(ids[-1])
    for wrong, status in (
        ({"ids": []}, 400),
        ({"ids": ["nobody"]}, 404),
        ({"ids": [ids[0]], "weight": 1.0}, 422),
        ({"ids": ids, "weight": 2}, 400),
    ):
        answer = client.post(search, json={"id": ids[0], "without": wrong})
        assert answer.status_code == status, answer.text


def test_less_like_this_goes_into_the_query_string_too(client, server):
    """The Python client asks that way, because its images are the body."""
    with Client(server) as mlcd_client:
        key = mlcd_client.search("demo", embeddings=[row(client)], top=1).matches[0][0].id
        query = {"key": key, "top": 3, "exact": True}
        nearest = mlcd_client.search("demo", **query).matches[0]
        without = {"ids": [nearest[2].id], "weight": 0.9}
        moved = mlcd_client.search("demo", **query, without=without).matches[0]
        assert nearest[2].id not in [match.id for match in moved]
    wrong = client.post("/v1/collections/demo/search?without={", json={"id": key})
    assert (wrong.status_code, wrong.json()["param"]) == (400, "without")


def row(client):
    (item,) = client.post("/v1/collections/demo/layout/items", json={"limit": 1}).json()["items"]
    path = f"/v1/collections/demo/items/{quote(item['id'], safe='')}"
    return client.get(path, params={"embedding": True}).json()["embedding"]


def test_the_client_asks_for_the_same(server, client, centers):
    with Client(server) as ours:
        listed = ours.centers("demo", num=5, examples=2)
        assert [center.id for center in listed] == [c["id"] for c in centers["centers"][:5]]
        assert len(ours.centers("demo", num=1000)) == centers["total"]
        center = listed[0]
        members = ours.members(center.id, "demo", num=1000)
        assert len(members) == center.members
        assert [m.id for m in members[:2]] == [example.id for example in center.examples]
        assert ours.thumbnail("demo", members[0].id)[:4] == b"RIFF"
        layout = ours.layout("demo")
        assert layout.points.shape == (client.get("/v1/collections/demo").json()["items"], 2)
        assert ours.layout("demo", first=3).points.tolist() == layout.points[:3].tolist()
        some = ours.layout_items("demo", positions=[2, 0])
        assert [item.position for item in some.items] == [2, 0]
        inside = ours.layout_items("demo", polygon=[(-2, -2), (2, -2), (0, 4)], limit=1)
        assert (inside.total > 1, len(inside.items)) == (True, 1)
        (gone,) = ours.delete_items("demo", ["nobody"])
        assert (gone.id, gone.outcome) == ("nobody", "missing")
        with pytest.raises(RefusedNotFound):
            ours.thumbnail("demo", "nobody")
