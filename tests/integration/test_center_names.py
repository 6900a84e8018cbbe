"""The names of a server's centers: found by name and alternate, changed one by one, kept on disk."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.given_names import change_names, current_names
from mlcd.artifacts.manifest import open_artifact
from mlcd.artifacts.name_evidence import NameEvidence, write_evidence
from mlcd.client import AsyncClient, Client, RefusedNotFound
from mlcd.pipelines.verify import verify
from tests.integration.running import children, serving

EVIDENCE = {
    0: {"name": "Tabby cat", "alternates": ["tiger cat", "lynx"]},
    1: {"name": "lynx", "alternates": ["wolf", "cat"]},
    2: {"name": None, "alternates": ["cat", "dog"]},  # too weak for a name
}
GROUNDS = {
    "score": 0.7,
    "margin": 0.2,
    "by_chance": 0.1,
    "members": 64,
    "terms": [{"term": "tabby", "score": 0.7, "share": 0.9, "leading": 0.6, "elsewhere": 0.1}],
    "unlike": {"center": 1, "term": "stripes", "share": 0.8, "there": 0.1},
}


@pytest.fixture(scope="module")
def centers(model_to_change):
    """Centers of which two are named from evidence."""
    artifact = open_artifact(model_to_change / "centers")
    num = len(Centers.read(artifact).sizes)
    nothing = {"name": None, "alternates": []}
    found = [GROUNDS | EVIDENCE.get(c, nothing) for c in range(num)]
    evidence = NameEvidence({"words": "x"}, found)
    file = write_evidence(artifact, evidence)
    change_names(artifact, lambda given: given.set_from(file, evidence.names))
    return artifact


@pytest.fixture(scope="module")
def naming(model_to_change, centers):
    with serving(model_to_change) as server:
        yield server
        os.kill(server.process.pid, signal.SIGKILL)  # whatever was answered has to be on the disk
        server.process.communicate()
        given = current_names(centers)
        assert given.names[0] == "a cat, 猫"
        assert {f"name {n}" for n in range(9)} <= set(given.names)
        list(verify(centers.path))
        server.start_again()
        with httpx.Client(base_url=server.wait_ready().url) as client:
            assert client.get("/v1/centers/0").json()["name"] == "a cat, 猫"


@pytest.fixture(scope="module")
def named(naming):
    with httpx.Client(base_url=naming.url, timeout=30) as client:
        yield client


def found(client, **params):
    answer = client.get("/v1/centers", params={"sort": "id", **params}).json()
    return [(each["id"], each["name"], each["alternates"]) for each in answer["centers"]]


def test_centers_are_found_by_names_and_alternates(named):
    first, second = (0, "Tabby cat", ["tiger cat", "lynx"]), (1, "lynx", ["wolf", "cat"])
    assert found(named, query="CAT") == [first, second]
    assert found(named, query="lynx cat") == [first, second]
    assert found(named, query="tiger tabby") == [first]
    assert found(named, query="cat tiger cat wolf") == found(named, query="dog") == []
    assert found(named, name="cat") == [first]
    page = named.get("/v1/centers", params={"query": "cat", "limit": 1, "sort": "name"}).json()
    assert (page["total"], page["centers"][0]["id"]) == (2, 1)
    rest = named.get(
        "/v1/centers", params={"query": "cat", "sort": "name", "cursor": page["next"]}
    ).json()
    assert ([each["id"] for each in rest["centers"]], rest["next"]) == ([0], None)
    described = named.get("/v1/centers/1").json()
    assert described["alternates"] == ["wolf", "cat"]
    assert described["evidence"] == {**GROUNDS, "name": "lynx"}


def test_names_given_by_the_command_are_shown_without_a_restart(named, centers):
    change_names(centers, lambda given: given.set_by_hand({11: "given outside"}))
    assert found(named, query="given outside") == [(11, "given outside", [])]
    assert named.get("/v1/centers/11").json()["name"] == "given outside"
    vector = Centers.read(centers).vectors[11].tolist()
    label = named.post("/v1/labels?top=1", json={"embeddings": [vector]}).json()
    assert label["results"][0]["labels"][0]["name"] == "given outside"


@pytest.mark.slow
def test_several_processes_change_names_and_lose_none_when_one_is_killed(model_to_change, centers):
    """Every request has a connection of its own, which either process may take."""
    answered, unanswered = {}, {}
    with serving(model_to_change, processes=2) as server:

        def rename(center):
            for name in (f"kept {center} {n}" for n in range(8)):
                try:
                    httpx.patch(
                        f"{server.url}/v1/centers/{center}", json={"name": name}
                    ).raise_for_status()
                except httpx.TransportError:
                    unanswered[center] = name
                    continue
                answered[center] = name
                if name == "kept 4 4":
                    os.kill(children(server.process.pid)[0], signal.SIGKILL)

        with ThreadPoolExecutor(4) as pool:
            [*pool.map(rename, range(3, 11))]
        names = current_names(centers).names
        assert len(answered) == 8
        for center, name in answered.items():
            assert names[center] in (name, unanswered.get(center))
        server.wait_ready()
        for _ in range(10):
            listed = httpx.get(f"{server.url}/v1/centers?sort=id&limit=100").json()["centers"]
            assert tuple(each["name"] for each in listed) == names


def test_a_name_is_changed_and_shown_everywhere(named, naming, centers):
    version = current_names(centers).version
    answer = named.patch("/v1/centers/0", json={"name": " a cat, 猫 "})
    assert answer.json() == {
        "centers": centers.digest, "id": 0, "name": "a cat, 猫", "version": version + 1
    }  # fmt: skip
    expected = (0, "a cat, 猫", ["Tabby cat", "tiger cat", "lynx"])
    assert found(named, query="猫") == found(named, query="tabby") == [expected]
    vector = Centers.read(centers).vectors[0].tolist()
    label = named.post("/v1/labels?top=1", json={"embeddings": [vector]}).json()
    assert label["results"][0]["labels"][0]["name"] == "a cat, 猫"
    assert current_names(centers).names[0] == "a cat, 猫"  # durable when it was answered
    made = current_names(centers).history[-1]
    assert (made.center, made.before, made.since) == (0, "Tabby cat", "a cat, 猫")
    with Client(naming.url) as client:
        assert client.rename_center(2, "dog").version == version + 2
        assert [each.id for each in client.centers(query="dog")] == [2]
        assert client.rename_center(2, None).name is None
        assert client.center(0).alternates == ["Tabby cat", "tiger cat", "lynx"]
        with pytest.raises(RefusedNotFound):
            client.rename_center(100_000, "x")


async def test_names_that_come_together_are_all_kept(named, naming):
    async with AsyncClient(naming.url) as client:
        await asyncio.gather(*(client.rename_center(3 + n, f"name {n}") for n in range(9)))
        listed = await client.centers(query="name", num=100)
    assert {each.name for each in listed} == {f"name {n}" for n in range(9)}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"name": 3}, 400),
        ({"name": "x" * 201}, 400),
        ({"name": "two\nlines"}, 422),
        ({}, 400),
        ({"name": "x", "size": 3}, 400),
        ([], 400),
    ],
)
def test_what_is_no_name_is_refused_and_changes_nothing(named, centers, body, status):
    before = current_names(centers)
    answer = named.patch("/v1/centers/0", json=body)
    assert (answer.status_code, answer.json()["status"]) == (status, status), answer.text
    assert current_names(centers) == before
