"""Multipart forms: what is in them, where it is kept, and what cannot be read."""

import asyncio
import tempfile

import pytest
from starlette.requests import Request

from mlcd.service.errors import BadRequest
from mlcd.service.http.bodies import read_form
from mlcd.service.settings import Limits


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
    return posted(b"\r\n".join([*parts, b"--x--\r\n"]), content_type)


def posted(body, content_type="multipart/form-data; boundary=x"):
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive():
        return next(messages)

    scope = {"type": "http", "method": "POST"}
    scope |= {"headers": [(b"content-type", content_type.encode())]}
    return Request(scope, receive)


def read(request):
    return asyncio.run(read_form(request, Limits(), texts=("items",)))


def test_files_and_the_last_text_of_each_name():
    assert read(form(b"one", b"two", items="[1]")) == ([b"one", b"two"], {"items": "[1]"})


def part(head, content=b"one"):
    return b"--x\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n"


def of_parts(*parts):
    return posted(b"".join(parts) + b"--x--\r\n")


FILE = 'Content-Disposition: form-data; name="files"'


def test_an_image_without_a_file_name_is_a_file():
    for kind in ("image/png", "IMAGE/jpeg", "application/octet-stream"):
        nameless = part(f"{FILE}\r\nContent-Type: {kind}", b"\xff\x00")
        named = part(f'{FILE}; filename="a.png"')
        assert read(of_parts(nameless, named))[0] == [b"\xff\x00", b"one"]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([part(FILE)], r'name="files"; filename="a.png" \(curl: -F files=@a.png\)'),
        ([part(f'{FILE}; filename="a.png"'), part(FILE)], "must be a file, got a text"),
        ([part(f"{FILE}\r\nContent-Type: text/plain")], "must be a file, got a text"),
        ([part(FILE.replace("files", "file") + "; filename=a")], "did you mean `files`"),
        ([part(f"{FILE}; filename=a"), part(FILE.replace("files", "itms"))], "mean `items`"),
        ([part(f"{FILE}; filename=a"), part(FILE.replace("files", "é=1"))], "a name in the form"),
        ([part(f"{FILE}; filename=a"), part(FILE.replace("files", "items") + "; filename=b")],
         "`items` of the form must be a text, got a file"),
        ([part(FILE.replace("files", "items"))], "the form must have at least 1 file, got 0"),
    ],
)  # fmt: skip
def test_a_part_that_is_neither_a_file_nor_a_known_text_is_named(parts, said):
    with pytest.raises(BadRequest, match=said):
        read(of_parts(*parts))


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
