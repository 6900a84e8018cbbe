import json
from dataclasses import replace

import numpy as np
import pytest

from mlcd.client import AnswerInvalid, Client
from mlcd.client.call import Call
from mlcd.client.results import Answer, Embedded, Found, Labeled, Origin
from mlcd.errors import Conflict, ImageRejected
from mlcd.wire.item_search import ItemMatch
from mlcd.wire.nearest_centers import Label
from tests.unit.client.scripted import Reply, scripted

ORIGIN = Origin("m", "a" * 64, 1)
BAD = ImageRejected("undecodable", "the image is damaged", remedy="mend it")


def test_batches_of_two_models_are_not_mixed():
    for other in (
        replace(ORIGIN, fingerprint="b" * 64),
        replace(ORIGIN, centers="c"),
        replace(ORIGIN, rounded="float16"),
        replace(ORIGIN, preprocess_version=2),
    ):
        call = Call(strict=False, fingerprint=None)
        call.items(Answer([1], ORIGIN))
        call.items(Answer([BAD], None))
        call.items(Answer([2], ORIGIN))
        with pytest.raises(Conflict, match="precision changed during the call"):
            call.items(Answer([3], other))


def test_a_model_other_than_the_one_asked_for_is_refused():
    assert Call(strict=False, fingerprint="a" * 64).items(Answer([1], ORIGIN)) == [1]
    with pytest.raises(Conflict, match=r"a{12} and not with b{12}"):
        Call(strict=False, fingerprint="b" * 64).items(Answer([1], ORIGIN))


def test_strict_names_the_image_by_its_place_in_the_call():
    call = Call(strict=True, fingerprint=None)
    call.items(Answer([1, 2, 3], ORIGIN))
    with pytest.raises(ImageRejected) as caught:
        call.items(Answer([4, BAD], ORIGIN))
    assert str(caught.value) == "image 4: the image is damaged: mend it"
    assert caught.value.reason == "undecodable"


def test_rows_stand_at_their_images_places():
    rows = [np.array([1, 0], np.float32), BAD, np.array([0, 1], np.float32)]
    embedded = Embedded.of(rows, ORIGIN, dimension=7)
    assert embedded.vectors.dtype == np.float32
    assert embedded.vectors[[0, 2]].tolist() == [[1, 0], [0, 1]]
    assert np.isnan(embedded.vectors[1]).all()
    assert embedded.errors == {1: BAD}
    assert Embedded.of([], ORIGIN, dimension=7).vectors.shape == (0, 7)
    nothing = Embedded.of([BAD], ORIGIN, dimension=7).vectors
    assert nothing.shape == (1, 7)
    assert np.isnan(nothing).all()


def test_labels_are_padded_like_neighbors():
    five, two, seven = (
        Label(id=center, similarity=similarity, name=name, cluster=min(center, 3), path="x")
        for center, similarity, name in ((5, 0.5, "five"), (2, 0.25, None), (7, 1.0, None))
    )
    labels = [[five, two], BAD, [seven], []]
    labeled = Labeled.of(labels, ORIGIN)
    assert labeled.ids.tolist() == [[5, 2], [-1, -1], [7, -1], [-1, -1]]
    assert labeled.scores.tolist() == [[0.5, 0.25], [-np.inf] * 2, [1.0, -np.inf], [-np.inf] * 2]
    assert (labeled.ids.dtype, labeled.scores.dtype) == (np.int32, np.float32)
    assert labeled.names == [["five", None], [], [None], []]
    assert labeled.clusters.tolist() == [[3, 2], [-1, -1], [3, -1], [-1, -1]]
    assert labeled.paths == [["x", "x"], [], ["x"], []]
    assert labeled.errors == {1: BAD}
    assert Labeled.of([], ORIGIN).ids.shape == (0, 0)


def test_matches_stand_at_their_queries_places():
    match = ItemMatch(id="k", similarity=0.5, metadata=None)
    found = Found.of([[match], BAD], ORIGIN)
    assert (found.matches, found.errors) == ([[match], []], {1: BAD})


def test_a_server_that_states_no_limits_is_not_this_service():
    info = {
        "model": "m",
        "fingerprint": "a" * 64,
        "preprocess_version": 1,
        "version": "1",
        "dimension": 2,
        "engine": "onnx",
        "precision": "float32",
        "preprocess": {},
        "image_formats": [],
        "centers": None,
        "collections": [],
        "limits": {},
    }
    with (
        scripted(Reply(body=json.dumps(info).encode())) as (url, _),
        Client(url) as client,
        pytest.raises(AnswerInvalid, match="check the URL and the server's version"),
    ):
        client.embed([b"an image"])
