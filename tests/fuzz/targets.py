"""The code that is fed with untrusted bytes. Each target takes any bytes and raises AssertionError
at a fault.
"""

import functools
import json
import re

from mlcd.errors import ImageRejected
from mlcd.fetching.urls import Url, parse_url
from mlcd.images.decode import DecodeLimits, decode
from mlcd.images.transform import PreprocessSpec
from mlcd.service.fetch.image_url import ImageUrl
from mlcd.service.http.data_uris import image_from_field, image_from_uri
from tests.fuzz.in_process import Service

LIMITS = DecodeLimits(max_bytes=2**20, max_pixels=10**6)
SIDE = 32
REFUSALS = {400, 413, 415, 422}


@functools.cache
def service():
    return Service().__enter__()


def decoder(data):
    """An RGB picture within the limits, or ImageRejected; both decode modes agree on which."""
    try:
        image = decode(data, limits=LIMITS)
    except ImageRejected as rejection:
        _check_rejection(rejection)
        image = None
    if image is not None:
        assert image.mode == "RGB"
        assert image.width * image.height <= LIMITS.max_pixels
    for mode in ("exact", "fast"):
        try:
            pixels = PreprocessSpec(SIDE, SIDE, decode=mode).prepare(data, LIMITS)
        except ImageRejected:
            assert image is None
        else:
            assert image is not None
            assert pixels.shape == (3, SIDE, SIDE)


def data_uri(data):
    """Bytes, ImageRejected or a URL, which is read or refused in turn, whatever the text."""
    for text in (data.decode("latin-1"), data.decode("utf-8", "replace")):
        for read in (image_from_uri, image_from_field):
            found = read(text)
            if isinstance(found, ImageUrl):
                found = _read_url(found)
            if isinstance(found, ImageRejected):
                _check_rejection(found)
            else:
                assert isinstance(found, bytes | Url)


def _read_url(url):
    try:
        found = parse_url(url.text)
    except ImageRejected as rejection:
        return rejection
    assert re.fullmatch(r"[a-z0-9_.:-]+", found.host)
    return found


def multipart(data):
    """The first line is the Content-Type, the rest the body."""
    kind, _, body = data.partition(b"\n")
    answer = service().ask(
        "/v1/images/embed", body, (b"content-type", b"multipart/form-data" + kind)
    )
    check("own", answer)


def kserve(data):
    """The first line is Inference-Header-Content-Length, the rest the body."""
    length, _, body = data.partition(b"\n")
    headers = [
        (b"content-type", b"application/octet-stream"),
        (b"inference-header-content-length", length),
    ]
    check("kserve", service().ask(f"/v2/models/{service().model}/infer", body, *headers))


def json_bodies(data):
    """One body for every route that reads JSON."""
    for dialect, path in (
        ("openai", "/v1/embeddings"),
        ("cohere", "/v2/embed"),
        ("kserve", f"/v2/models/{service().model}/infer"),
    ):
        check(dialect, service().ask(path, data, (b"content-type", b"application/json")))


def check(dialect, answer):
    """Answered, or refused in the dialect's own shape; never a fault of the server."""
    assert answer.status in REFUSALS | {200, 404}, answer
    if answer.status == 200:
        return
    refusal = json.loads(answer.body)
    shape, message, media_type = {
        "own": (
            {"type", "title", "status", "detail", "instance", "request_id"},
            "detail",
            "application/problem+json",
        ),
        "openai": ({"error"}, "error", "application/json"),
        "cohere": ({"id", "message"}, "message", "application/json"),
        "kserve": ({"error"}, "error", "application/json"),
    }[dialect]
    assert set(refusal) - {"limit", "index", "param"} == shape, answer
    assert answer.media_type == media_type
    text = refusal[message]["message"] if dialect == "openai" else refusal[message]
    assert re.fullmatch(r"[\x20-\x7e…]{1,300}", text), answer


def _check_rejection(rejection):
    assert re.fullmatch(r"[\x20-\x7e…]{1,300}", str(rejection)), str(rejection)


TARGETS = {
    "decoder": decoder,
    "data-uri": data_uri,
    "multipart": multipart,
    "kserve": kserve,
    "json": json_bodies,
}
