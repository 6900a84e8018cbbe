"""No image hurts the service: each is answered or refused by its name, its neighbors and the next
request are not harmed.

Groups of hostile images go to a real server: each in a batch between two good ones, and by itself
on every other route.
"""

import base64
import csv
import itertools
import json
import re
import struct
import threading
import time

import httpx
import numpy as np
import pytest

from mlcd.errors import ImageReason
from tests import hostile
from tests.integration.bodies import data_uri, files
from tests.integration.running import serving

REASONS = set(ImageReason.__args__)
STATUSES = {200, 400, 413, 415, 422}
# of OpenAI and Cohere, whose clients have no class of error for these
IN_DIALECTS = {413: 400, 415: 400}
BATCH = 20
# of the process that decodes: fragments, and what libraries set up on the first image of a kind
GROWTH_MIB = 48


@pytest.fixture(scope="module")
def running(journey, new_state):
    # A line for each request is not what is looked for in its log: anything said of an image is.
    with serving(journey / "model", state_dir=new_state(), log__level="warning") as server:
        warm_up(server)
        before = server.resident_mib()
        yield server
        assert (
            server.metric('mlcd_held{of="images"}') == server.metric('mlcd_held{of="pixels"}') == 0
        )
        assert server.metric("mlcd_engine_restarts_total") == 0
        assert server.resident_mib() < before + GROWTH_MIB
        status, said = server.stop()
        assert status == 0
        assert re.fullmatch(r"serving [^\n]*\n", said), said[:2000]


def warm_up(server):
    url, kind = f"{server.url}/v1/images/embed", {"Content-Type": "image/png"}
    for _, data in hostile.shapes():
        httpx.post(url, content=data, headers=kind, timeout=30)


@pytest.fixture(scope="module")
def api(running, photo):
    with httpx.Client(base_url=running.url, timeout=60) as client:
        yield Api(client, photo)


class Api:
    """photo: the good image; its row and labels, alone, are the oracle of every batch."""

    def __init__(self, client, photo):
        self.client, self.photo = client, photo
        self.model = client.get("/v1/models").json()["data"][0]["id"]
        self.row = self.embed([photo])[0][0]
        self.labels = client.post("/v1/labels", files=files(photo)).json()["results"][0]["labels"]

    def embed(self, images):
        """Rows by index, and errors by index."""
        answer = self.client.post("/v1/images/embed", files=files(*images))
        assert answer.status_code == 200, answer.text
        assert_nothing_slipped_out(answer.text)
        body = answer.json()
        rows = {
            result["index"]: np.array(result["embedding"], np.float32) for result in body["results"]
        }
        return rows, {error["index"]: error["type"] for error in body["errors"]}

    def between(self, image):
        """Returns the result of an image between two good ones: None or why it is refused."""
        rows, errors = self.embed([self.photo, image, self.photo])
        assert np.array_equal(rows[0], self.row)
        assert np.array_equal(rows[2], self.row)
        assert (1 in rows) != (1 in errors)
        assert set(errors.values()) <= REASONS
        return errors.get(1)

    def together(self, images):
        """The same for many in one request, a good one after each."""
        rows, errors = self.embed([each for image in images for each in (image, self.photo)])
        for index in range(len(images)):
            assert np.array_equal(rows[2 * index + 1], self.row)
        assert set(errors.values()) <= REASONS
        return [errors.get(2 * index) for index in range(len(images))]

    def strictly(self, image):
        """One of each other route: every answer's status; all agree, each in its dialect."""
        post, encoded = self.client.post, data_uri(image)
        element = struct.pack("<I", len(image)) + image
        tensor = {"name": "image", "shape": [1], "datatype": "BYTES"}
        binary = tensor | {"parameters": {"binary_data_size": len(element)}}
        head = json.dumps({"inputs": [binary]}).encode()
        in_json = tensor | {"data": [base64.b64encode(image).decode()]}
        infer, npy = f"/v2/models/{self.model}/infer", {"Accept": "application/x-npy"}
        given = {"model": self.model, "input": [data_uri(self.photo), encoded]}
        dialects = [
            post("/v1/embeddings", json=given),
            post("/v2/embed", json={"model": self.model, "images": [encoded]}),
        ]
        length = {"Inference-Header-Content-Length": str(len(head))}
        answers = [
            post("/v1/images/embed", content=image, headers=npy | {"Content-Type": "image/jpeg"}),
            post("/v1/labels", files=files(self.photo, image), headers=npy),
            post(infer, json={"inputs": [in_json]}),
            post(infer, content=head + element, headers=length),
        ]
        for answer in answers + dialects:
            assert answer.status_code in STATUSES, answer.text
            if answer.status_code != 200:
                assert_nothing_slipped_out(answer.text)
        (status,) = {answer.status_code for answer in answers}
        assert {answer.status_code for answer in dialects} == {IN_DIALECTS.get(status, status)}
        mixed = self.client.post("/v1/labels", json={"images": [data_uri(self.photo), encoded]})
        assert mixed.json()["results"][0]["labels"] == self.labels
        return status

    def good_one_is_answered(self):
        started = time.monotonic()
        assert (
            self.client.post("/v1/labels", files=files(self.photo)).json()["results"][0]["labels"]
            == self.labels
        )
        assert time.monotonic() - started < 1


def assert_nothing_slipped_out(text):
    """No library's words, no payload, no path, no address."""
    for pattern in (
        r"Traceback",
        r"\bPIL\b|[Pp]illow",
        r"[Cc]annot identify",
        r"broken data stream|image file is truncated|decoder error|libjpeg|libpng|zlib",
        r"0x[0-9a-f]{6,}",
        r"BytesIO",
        r"/[a-z]+/[a-z./]*\.py",
        r"alert\(|passwd",
        r"[A-Za-z0-9+/]{200}",
    ):
        found = re.search(pattern, text)
        assert not found, f"{pattern}: {text[max(0, found.start() - 100) : found.end() + 100]}"


def batches(images):
    images = iter(images)
    while batch := list(itertools.islice(images, BATCH)):
        yield batch


def through(api, images):
    """All in batches; the outcomes by name."""
    outcomes = {}
    for batch in batches(images):
        names, data = zip(*batch, strict=True)
        outcomes |= dict(zip(names, api.together(data), strict=True))
    api.good_one_is_answered()
    return outcomes


def test_truncated_images_are_refused_and_their_neighbors_answered(api):
    outcomes = through(api, hostile.truncated(step=7))
    assert {name for name, reason in outcomes.items() if reason is None} == set()
    for name, data in list(hostile.truncated(step=25)):
        assert api.strictly(data) in {415, 422}, name


def test_images_with_flipped_bits_are_pictures_or_refused(api):
    outcomes = through(api, hostile.flipped(num=25))
    assert {None, "undecodable", "unsupported-format"} <= set(outcomes.values())
    assert set(outcomes.values()) <= {None, "undecodable", "unsupported-format", "too-many-pixels"}


BOMBS = {
    "PNG of 400 megapixels": "too-many-pixels",
    "PNG of 85 megapixels": None,
    "PNG that says 4 gigapixels": "too-many-pixels",
    "PNG whose text unpacks to 64 MiB": None,
    "PNG with 64 MiB of pixels for one": None,
    "GIF of 65535 x 65535": "too-many-pixels",
    "GIF whose frame is larger than its screen": "too-many-pixels",
    "WebP of 16383 x 16383": "too-many-pixels",
    "TIFF of 400 megapixels": "too-many-pixels",
    "TIFF of 80 megapixels": None,
    "JPEG of 400 megapixels": "too-many-pixels",
    "BMP that says 4 gigapixels": "too-many-pixels",
}


@pytest.fixture(scope="module")
def bombs():
    return dict(hostile.bombs())


def test_bombs_are_refused_by_their_header_or_decoded_within_bounds(api, bombs):
    assert {name: api.between(data) for name, data in bombs.items()} == BOMBS
    api.good_one_is_answered()
    for name, data in bombs.items():
        if BOMBS[name] is not None:
            assert api.strictly(data) in {413, 422}, name


def test_the_server_answers_while_bombs_are_decoded(running, api, bombs):
    """Four requests of the largest pictures that are let in; somebody asks for health all the
    while.
    """
    large = [bombs["PNG of 85 megapixels"], bombs["TIFF of 80 megapixels"]]
    senders = [threading.Thread(target=api.embed, args=(large,)) for _ in range(4)]
    for sender in senders:
        sender.start()
    longest = 0.0
    with httpx.Client(base_url=running.url) as asking:
        while any(sender.is_alive() for sender in senders):
            started = time.monotonic()
            assert asking.get("/health/live").status_code == 200
            longest = max(longest, time.monotonic() - started)
            time.sleep(0.01)
    assert longest < 1
    api.good_one_is_answered()


def test_odd_shapes_are_pictures(api):
    shapes = list(hostile.shapes())
    assert set(through(api, shapes).values()) == {None}
    for name, data in shapes[::5]:
        assert api.strictly(data) == 200, name


def test_of_two_kinds_at_once_the_picture_counts_and_nothing_runs(api):
    polyglots = list(hostile.polyglots())
    outcomes = through(api, polyglots)
    pictures = {name for name, reason in outcomes.items() if reason is None}
    assert pictures == {
        "JPEG and ZIP",
        "whole GIF and JavaScript",
        "HTML in a JPEG's comment",
        *(f"{kind} twice" for kind in hostile.KINDS),
    }
    expected = {"unsupported-format", "undecodable", "empty"}
    assert {outcomes[name] for name in outcomes.keys() - pictures} == expected
    assert outcomes["GIF and JavaScript"] == "undecodable"
    for name, data in polyglots[::3]:
        assert api.strictly(data) == {None: 200, "unsupported-format": 415}.get(
            outcomes[name], 422
        ), name


def test_of_an_animation_only_the_first_frame_is_decoded(api):
    assert set(through(api, hostile.animations()).values()) == {None}


def test_the_shared_corpus_is_answered_as_the_decoder_alone_decides(api, shared_data):
    folder = shared_data / "nasty_images"
    with (folder / "expected.csv").open() as file:
        paths = [row["path"] for row in csv.DictReader(file)]
    outcomes = through(api, ((path, (folder / path).read_bytes()) for path in paths))
    assert len(outcomes) == 611
    assert len([reason for reason in outcomes.values() if reason is None]) > 300
    for path in paths[::40]:
        assert (api.strictly((folder / path).read_bytes()) == 200) == (outcomes[path] is None), path
