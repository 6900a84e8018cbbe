"""Answers that are not of this API, from a real server, and fields that this client does not know
yet.
"""

import json

import httpx
import numpy as np
import pytest

from mlcd.client import AnswerInvalid, Client
from mlcd.client.reading import read_embedded, read_info, read_labeled, read_rows
from tests.unit.client.scripted import Reply, scripted

STAMP = {"X-Mlcd-Model": "m", "X-Mlcd-Fingerprint": "f", "X-Mlcd-Preprocess-Version": "1"}
STAMP |= {"X-Mlcd-Dimension": "2"}


MODEL = {"model": "m", "fingerprint": "f", "preprocess_version": 1}


def answer(content, **headers):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return httpx.Response(200, content=body, headers=STAMP | headers)


def test_rows_are_read_in_the_order_of_bytes_of_the_contract():
    rows = np.array([[1.5, -2], [0.25, 3]], ">f4")
    read = read_rows(answer(rows.astype("<f4").tobytes()), 2)
    assert np.stack(read.items).tolist() == rows.tolist()
    assert (read.origin.model, read.origin.fingerprint, read.origin.rounded) == ("m", "f", None)
    found = read_rows(answer(rows.tobytes(), **{"X-Mlcd-Rounded": "float16"}), 2).origin.rounded
    assert found == "float16"


@pytest.mark.parametrize(
    "response",
    [
        answer(bytes(15)),
        answer(bytes(24)),
        answer(b""),
        answer(bytes(16), **{"X-Mlcd-Dimension": "two"}),
        httpx.Response(200, content=bytes(16)),
    ],
)
def test_rows_of_another_shape_are_refused(response):
    with pytest.raises(AnswerInvalid):
        read_rows(response, 2)


@pytest.mark.parametrize(
    "content",
    [
        b"<html>",
        [],
        {},
        MODEL | {"dimension": 2, "results": [], "errors": []},
        MODEL | {"dimension": 2, "results": [{"index": 0, "embedding": [1, 2]}], "errors": []},
        MODEL
        | {"dimension": 2, "errors": []}
        | {"results": [{"index": i, "embedding": ["a"]} for i in range(2)]},
        MODEL | {"dimension": 2, "results": None, "errors": []},
    ],
)
def test_json_that_lacks_an_item_or_is_something_else_is_refused(content):
    with pytest.raises(AnswerInvalid):
        read_embedded(answer(content), 2)


def test_fields_and_values_of_a_newer_server_are_passed_over():
    label = {"id": 1, "similarity": 0.5, "name": None, "cluster": 1, "color": "red"}
    numbers = dict.fromkeys(("recall", "low", "high", "rows", "top", "cells", "probes"), 1)
    content = MODEL | {
        "centers": "c",
        "mode": "guessed",
        "results": [{"index": 0, "labels": [label], "x": 1}],
        "errors": [{"index": 1, "type": "too-dull", "title": "T", "detail": "D", "z": 3}],
        "y": 2,
        "audit": numbers | {"source": "elsewhere", "w": 0},
    }
    read = read_labeled(answer(content), 2)
    assert read.items[0][0].similarity == 0.5
    assert (read.items[1].reason, read.items[1].message) == ("too-dull", "D")
    assert (read.origin.audit.recall, read.origin.audit.source) == (1, "elsewhere")
    with pytest.raises(AnswerInvalid):
        read_info(answer({"model": "m"}))


@pytest.mark.parametrize("page", [b"<html>It works!</html>", b'{"status": "ok"}', b"null"])
def test_another_server_at_the_url_is_noticed(page):
    with scripted(Reply(body=page)) as (url, asked), Client(url) as client:
        with pytest.raises(AnswerInvalid, match="does not follow this API: check the URL"):
            client.embed([b"image"])
        assert len(asked) == 1
