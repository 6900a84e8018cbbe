"""Multipart forms: what is in them, where it is kept, and what cannot be read."""

import asyncio
import tempfile

import pytest
from starlette.requests import Request

from service.errors import BadRequest
from service.http.bodies import read_form
from service.settings import Limits


def form(*files, content_type="multipart/form-data; boundary=x", **texts):
    """A request with these files and fields."""
    parts = [
        b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n' + data
        for data in files
    ]
    parts += [
        f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}'.encode()
        for name, text in texts.items()
    ]
    messages = iter(
        [{"type": "http.request", "body": b"\r\n".join([*parts, b"--x--\r\n"]), "more_body": False}]
    )

    async def receive():
        return next(messages)

    scope = {
        "type": "http",
        "method": "POST",
        "headers": [(b"content-type", content_type.encode())],
    }
    return Request(scope, receive)


def read(request):
    return asyncio.run(read_form(request, Limits()))


def test_files_and_the_last_text_of_each_name():
    assert read(form(b"one", b"two", items="[1]")) == ([b"one", b"two"], {"items": "[1]"})


def test_a_large_file_needs_no_disk(monkeypatch):
    def refuse(_file):
        raise OSError("no space left")

    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", refuse)
    large = bytes(5_000_000)
    assert read(form(large, large))[0] == [large, large]


def with_charset(charset):
    return form(b"one", content_type=f"multipart/form-data; boundary=x; charset={charset}")


@pytest.mark.parametrize("charset", ["no-such", "latin-1", ""])
def test_a_charset_that_nobody_knows_is_passed_over(charset):
    assert read(with_charset(charset))[0] == [b"one"]


def test_the_charset_that_an_unset_variable_gives_is_refused():
    """Python has a codec of that name, which refuses everything."""
    with pytest.raises(BadRequest, match="cannot be read"):
        read(with_charset("undefined"))


@pytest.mark.parametrize(
    "content_type",
    ["multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=y"],
)
def test_a_form_without_its_boundary_is_refused(content_type):
    with pytest.raises(BadRequest, match="cannot be read"):
        read(form(b"one", content_type=content_type))
