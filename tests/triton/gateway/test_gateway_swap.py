"""POST /v1/models/{name}/load: one version of a model after the other while clients go on
asking.
"""

import itertools
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from mlcd.export.triton import export_triton
from mlcd.export.triton_config import TritonOptions
from tests.integration.bodies import data_uri, files
from tests.integration.running import serving, until
from tests.triton.conftest import SILENT, Server, require_triton
from tests.triton.gateway.conftest import NAME

pytestmark = pytest.mark.triton

NUM_CLIENTS = 8
NUM_SWAPS = 100
MAX_GROWTH_MIB = 8
PNG = {"Content-Type": "image/png"}


@pytest.fixture(scope="module")
def versions(journey, tmp_path_factory):
    """1: the trained model, whose centers and collection the journey made. 2: the same before its
    training.
    """
    require_triton()
    out = tmp_path_factory.mktemp("versions") / "repository"
    for number, spec in (
        (1, journey / "model"),
        (2, journey / "run" / "checkpoints" / "step_000000"),
    ):
        options = TritonOptions("python", num_threads=1)
        export_triton(str(spec), out, name=NAME, version=number, options=options, reporter=SILENT)
    return out


@pytest.fixture
def triton(versions, tmp_path):
    """A server of the test's own, with both versions loaded."""
    repository = tmp_path / "repository"
    shutil.copytree(versions, repository)
    server = Server(repository, tmp_path / "triton.log")
    server.start()
    yield server
    server.kill()


def gateway_of(triton, **settings):
    return serving(
        NAME, engine="triton", triton__url=triton.url, **{"triton__version": 1} | settings
    )


def load(gateway, body=None, name=NAME, **options):
    return httpx.post(f"{gateway.url}/v1/models/{name}/load", json=body, timeout=60, **options)


def embed(client, image):
    return client.post("/v1/images/embed", content=image, headers=PNG)


def rows(answer):
    return np.array([result["embedding"] for result in answer.json()["results"]])


def loaded(triton):
    return httpx.get(f"http://127.0.0.1:{triton.ports['http']}/v2/models/{NAME}").json()["versions"]


class Load:
    """Clients that never pause: every answer as (status, fingerprint of the header and of the body,
    vector).
    """

    def __init__(self, gateway, image):
        self.answers, self._gateway, self._image = [], gateway, image
        self._stop = threading.Event()
        self._numbers = itertools.count()

    def __enter__(self):
        self._pool = ThreadPoolExecutor(NUM_CLIENTS)
        self._clients = [self._pool.submit(self._ask) for _ in range(NUM_CLIENTS)]
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._pool.shutdown()
        for client in self._clients:
            client.result()

    def _ask(self):
        with httpx.Client(base_url=self._gateway.url, timeout=60) as client:
            while not self._stop.is_set():
                number = next(self._numbers)
                # Every other one is new to the cache.
                image = self._image + (number.to_bytes(4) if number % 2 else b"")
                answer = embed(client, image)
                if answer.status_code == 200:
                    said = (answer.headers["x-mlcd-fingerprint"], answer.json()["fingerprint"])
                    self.answers.append((200, *said, rows(answer)[0]))
                else:
                    self.answers.append((answer.status_code, answer.text, None, None))

    def check(self, expected):
        """No failed request, and every vector is of the model that its answer names. How often each
        answered.
        """
        assert {status for status, *_ in self.answers} == {200}, self.answers
        for _, of_header, of_body, vector in self.answers:
            assert of_header == of_body
            assert vector == pytest.approx(expected[of_header], abs=1e-5)
        return {name: sum(answer[1] == name for answer in self.answers) for name in expected}


def vectors(gateway, image):
    """The vectors of versions 1 and 2 by fingerprint; version 1 is served afterwards."""
    found = {}
    for version in (1, 2, 1):
        assert load(gateway, {"version": version}).status_code == 200
        answer = httpx.post(f"{gateway.url}/v1/images/embed", content=image, headers=PNG)
        found[answer.headers["x-mlcd-fingerprint"]] = rows(answer)[0]
    first, second = found.values()
    assert np.abs(first - second).max() > 0.01
    return found


def test_under_load_no_request_fails_and_no_vector_has_another_models_name(triton, picture):
    with gateway_of(triton) as gateway:
        expected = vectors(gateway, picture[1])
        with Load(gateway, picture[1]) as clients:
            for version in (2, 1, None, 1):
                num_before = len(clients.answers)
                until(
                    lambda num_before=num_before: (
                        len(clients.answers) > num_before + 2 * NUM_CLIENTS
                    ),
                    30,
                )
                answer = load(gateway, {"version": version})
                assert (answer.status_code, answer.json()["version"]) == (200, version or 2), (
                    answer.text
                )
        assert min(clients.check(expected).values()) > NUM_CLIENTS


def test_everything_that_names_the_model_follows_and_triton_lets_go_of_the_other(triton, picture):
    with gateway_of(triton) as gateway, httpx.Client(base_url=gateway.url, timeout=30) as client:
        before = embed(client, picture[1])
        again = embed(client, picture[1])
        assert (rows(before) == rows(again)).all()
        answer = load(gateway, {"version": 2, "unload": False}).json()
        assert loaded(triton) == ["1", "2"]
        later = client.get("/v1/info")
        assert (
            answer["fingerprint"]
            == later.json()["fingerprint"]
            == later.headers["x-mlcd-fingerprint"]
        )
        assert answer["fingerprint"] != before.headers["x-mlcd-fingerprint"]
        series = [
            line
            for line in client.get("/metrics").text.splitlines()
            if line.startswith("mlcd_model_info{")
        ]
        assert len(series) == 1
        assert answer["fingerprint"] in series[0]
        assert gateway.metric("mlcd_engine_up") == 1
        # The cache knows the picture, by the model before.
        assert np.abs(rows(embed(client, picture[1])) - rows(before)).max() > 0.01
        assert load(gateway).json()["version"] == 2
        until(lambda: loaded(triton) == ["2"], 30)
        found = load(gateway, {"version": 1}).json()["fingerprint"]
        assert found == before.headers["x-mlcd-fingerprint"]
        assert (rows(embed(client, picture[1])) == rows(before)).all()
        until(lambda: loaded(triton) == ["1"], 30)


def test_centers_and_collections_of_the_other_version_are_refused_until_it_is_back(
    triton, journey, picture, tmp_path
):
    centers, state = tmp_path / "centers", tmp_path / "state"
    shutil.copytree(journey / "model" / "centers", centers)
    with (
        gateway_of(triton, centers=centers, state_dir=state) as gateway,
        httpx.Client(base_url=gateway.url, timeout=30) as client,
    ):
        image = {"images": [data_uri(picture[1])]}
        tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": image["images"]}
        labels = {"inputs": [tensor], "outputs": [{"name": "label_ids"}]}
        ours = client.get("/v1/info").json()
        first = client.post("/v1/labels", json=image)
        assert (first.status_code, ours["collections"]) == (200, [])
        # Made since the start: what is on disk is read with every load.
        shutil.copytree(journey / "collections" / "demo", state / "collections" / "demo")
        answer = load(gateway, {"version": 2}).json()
        assert (answer["centers"], answer["collections"]) == (None, [])
        expected = {"centers": ours["fingerprint"], "collections": {"demo": ours["fingerprint"]}}
        assert answer["foreign"] == expected
        assert "x-mlcd-centers" not in client.get("/v1/info").headers
        for refused in (
            client.post("/v1/labels", json=image),
            client.get("/v1/centers/0"),
            client.get("/v1/collections/demo"),
            client.post("/v1/collections/demo/search", json=image),
            client.post(f"/v2/models/{NAME}/infer", json=labels),
        ):
            assert refused.status_code == 409
            assert ours["fingerprint"] in refused.text
            assert answer["fingerprint"] in refused.text
        assert client.post("/v1/images/embed", files=files(picture[1])).status_code == 200
        back = load(gateway, {"version": 1}).json()
        assert (back["centers"], back["collections"]) == (ours["centers"]["digest"], ["demo"])
        assert client.post("/v1/labels", json=image).json() == first.json()
        assert client.post("/v1/collections/demo/search", json=image).status_code == 200


def test_what_cannot_be_loaded_is_refused_and_the_version_before_goes_on(triton, picture):
    with gateway_of(triton) as gateway, httpx.Client(base_url=gateway.url, timeout=30) as client:
        before = embed(client, picture[1]).headers["x-mlcd-fingerprint"]

        def refused(status, message, body=None, name=NAME):
            answer = load(gateway, body, name)
            assert (answer.status_code, message in answer.text) == (status, True), answer.text
            assert client.get("/v1/info").json()["fingerprint"] == before

        refused(404, "no version 7 of the model", {"version": 7})
        refused(404, "this server serves another model", name="another")
        refused(400, "version must be at least 1", {"version": 0})
        add_version(triton.repository, "raise ValueError('a secret of the server')")
        refused(409, "Triton cannot load the model", {"version": 3})
        assert "secret" not in load(gateway, {"version": 3}).text
        add_version(triton.repository, OTHER_SHAPE)
        refused(503, "unlike its configuration", {"version": 3})
        assert embed(client, picture[1] + b"new").headers["x-mlcd-fingerprint"] == before
        assert gateway.ready()


def test_a_model_that_was_unloaded_is_loaded_again(triton, picture):
    with gateway_of(triton) as gateway:
        triton.unload(NAME)
        until(lambda: not gateway.ready(), 5)
        assert load(gateway, {"version": 1}).json()["version"] == 1
        until(gateway.ready, 5)
        triton.kill()
        answer = load(gateway)
        assert (answer.status_code, "Triton cannot be reached" in answer.text) == (503, True)


OTHER_SHAPE = """

class TritonPythonModel(TritonPythonModel):
    def execute(self, requests):
        import triton_python_backend_utils as pb_utils

        rows = pb_utils.Tensor("embedding", np.ones((1, 3), np.float32))
        return [pb_utils.InferenceResponse([rows]) for request in requests]
"""
SLOW = """

class TritonPythonModel(TritonPythonModel):
    def initialize(self, args):
        import time
        time.sleep(3)
        super().initialize(args)
"""


def add_version(repository, code):
    """A third, of the second's graph, with other code at the end of its model.py."""
    folder = repository / NAME
    shutil.rmtree(folder / "3", ignore_errors=True)
    shutil.copytree(folder / "2", folder / "3")
    script = folder / "3" / "model.py"
    script.write_text(script.read_text() + code)
    config = folder / "config.pbtxt"
    lines = [line for line in (folder / "2" / "config.pbtxt").read_text().splitlines() if line]
    lines += [line.replace('.2"', '.3"') for line in lines if '.2"' in line]
    config.write_text(
        "\n".join(lines).replace("versions: [ 1, 2 ]", "versions: [ 1, 2, 3 ]") + "\n"
    )


def test_one_load_at_a_time_and_it_goes_on_when_nobody_waits_for_it(triton):
    with gateway_of(triton, limits__deadline_s=2) as gateway:
        before = httpx.get(f"{gateway.url}/v1/info").json()["fingerprint"]
        add_version(triton.repository, SLOW)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(load, gateway, {"version": 3})
            until(lambda: "loading: mlcd-vit:3" in triton.log.read_text(), 10)
            second = load(gateway, {"version": 2})
            found = (second.status_code, "another version is being loaded" in second.text)
            assert found == (409, True)
            answer = first.result()
        assert (answer.status_code, "loading continues" in answer.text) == (504, True)
        until(lambda: httpx.get(f"{gateway.url}/v1/info").json()["fingerprint"] != before, 30)
        until(lambda: loaded(triton) == ["3"], 30)


def test_a_server_that_stops_during_a_load_ends_in_time(triton):
    with gateway_of(triton, grace_s=1) as gateway, ThreadPoolExecutor(1) as pool:
        add_version(triton.repository, SLOW)
        asked = pool.submit(load, gateway, {"version": 3})
        until(lambda: "loading: mlcd-vit:3" in triton.log.read_text(), 10)
        status, output = gateway.stop()
        assert (status, "Traceback" in output) == (0, False), output
        assert asked.exception() is not None or asked.result().status_code >= 500


def test_several_processes_and_other_engines_refuse(triton):
    with gateway_of(triton, processes=2) as gateway:
        answer = load(gateway, {"version": 2})
        assert (answer.status_code, "restart the server" in answer.text) == (409, True)
    with serving("hog") as gateway:
        answer = load(gateway, name="hog")
        assert (answer.status_code, "needs the engine triton" in answer.text) == (409, True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_swaps_under_load_fail_nobody_and_memory_stays_flat(triton, picture):
    """The memory is that of the gateway and of Triton with one stub; the first tenth includes
    one-time allocations.
    """
    with gateway_of(
        triton, cache__memory_bytes=2**20
    ) as gateway:  # full before the first tenth ends
        expected = vectors(gateway, picture[1])
        resident = []
        with Load(gateway, picture[1]) as clients:
            for number in range(NUM_SWAPS):
                assert load(gateway, {"version": 2 - number % 2}).status_code == 200
                wanted = [str(2 - number % 2)]
                until(lambda wanted=wanted: loaded(triton) == wanted, 60)
                if number % 10 == 9:
                    until(lambda: len(triton.resident_mib()) == 2, 60)
                    resident.append((gateway.resident_mib(), sum(triton.resident_mib())))
        told = [tuple(map(round, pair)) for pair in resident]
        print("gateway and Triton, MiB after every ten swaps:", told)  # noqa: T201
        assert min(clients.check(expected).values()) > NUM_SWAPS
        for series in zip(*resident, strict=True):
            assert max(series[1:]) - series[0] < MAX_GROWTH_MIB, resident
