import pytest
from fastapi import Request

from service.api.answers import ARROW, JSON, NPY, RAW, negotiated
from service.problems import NotAcceptable

OFFERED = (JSON, RAW, NPY, ARROW)


def asked(accept):
    return Request({"type": "http", "headers": [] if accept is None else [(b"accept", accept.encode())]})


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (None, JSON),
        ("", JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        ("application/x-npy", NPY),
        ("Application/X-NPY; q=0.5", NPY),
        ("text/html, application/octet-stream", RAW),
        ("application/json;q=0.2, application/x-npy;q=0.9", NPY),
        ("application/x-npy;q=0, */*", JSON),
        ("application/json;q=high, application/x-npy", NPY),
    ],
)
def test_the_preferred_media_type_is_chosen(accept, chosen):
    assert negotiated(asked(accept), OFFERED) == chosen


@pytest.mark.parametrize("accept", ["text/html", "application/json;q=0", "image/*", "application/x-npy;q=nan"])
def test_what_cannot_be_given_is_refused(accept):
    with pytest.raises(NotAcceptable, match="accept one of"):
        negotiated(asked(accept), OFFERED)
