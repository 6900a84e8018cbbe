import base64

import pytest

from mlcd.errors import ImageRejected
from mlcd.service.fetch.image_url import ImageUrl
from mlcd.service.http.data_uris import image_from_field, image_from_uri

TEXT = base64.b64encode(b"\x00\xffimage").decode()


@pytest.mark.parametrize(
    "head",
    [
        "data:image/png;base64",
        "DATA:image/png;charset=x;BASE64",
        "data:;base64",
        "data:image/png; base64 ",
    ],
)
def test_a_data_uri_becomes_its_bytes(head):
    assert image_from_uri(f"{head},{TEXT}") == b"\x00\xffimage"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("a text", "must be a data-URI or a URL"),
        ("/etc/passwd", "must be a data-URI or a URL"),
        ("file:///etc/passwd", "must be a data-URI or a URL"),
        (f"data:image/png,{TEXT}", "must be in base64"),
        ("data:image/png;base64", "must be in base64"),
        ("data:image/png;base64,A", "it has 1 characters, so some are missing"),
        (f"data:image/png;base64,{TEXT}AAAAA", "not valid base64"),
        (f"data:image/png;base64,{TEXT[:4]}=={TEXT}", "its character 5 is U+003D"),
        (f"data:image/png;base64,{TEXT[:4]}%0A{TEXT}", "its character 5 is U+0025"),
        ("data:image/png;base64,\ud800é", "its character 1 is U+D800"),
        (f"data:image/png;base64,{TEXT}\u2028", "its character 11 is U+003D"),
        (TEXT, "must be a data-URI or a URL"),
        (7, "must be a data-URI"),
        (None, "must be a data-URI"),
    ],
)
def test_anything_else_is_refused_without_a_word_of_it(value, message):
    refused = image_from_uri(value)
    assert isinstance(refused, ImageRejected)
    assert refused.reason == "unreadable"
    assert message in str(refused)
    assert "passwd" not in str(refused)
    assert TEXT not in str(refused)


@pytest.mark.parametrize(
    "url", ["HTTP://example.com/x.png", "https://example.com/x.png", "http://["]
)
def test_a_url_stays_one_unread_and_unseen(url):
    for read in (image_from_uri, image_from_field):
        assert read(url) == ImageUrl(url)
    assert "http" not in repr(read(url)).lower()


@pytest.mark.parametrize(
    "image", [b"", b"a", b"ab", b"abc", bytes(range(256)) * 3, b"\xfb\xff\xfe"]
)
def test_lines_a_missing_padding_and_the_alphabet_of_urls_are_read(image):
    standard, for_urls = base64.b64encode(image).decode(), base64.urlsafe_b64encode(image).decode()
    lines = base64.encodebytes(image).decode()
    for text in (standard, for_urls, standard.rstrip("="), for_urls.rstrip("="), lines):
        for form in (text, text.replace("\n", "\r\n"), f" {text}\n", text.replace("", " ")):
            assert image_from_uri(f"data:image/png;base64,{form}") == image
            assert image_from_field(form) == image


def test_plain_base64_is_an_image_where_the_field_says_so():
    assert image_from_field(TEXT) == b"\x00\xffimage"
    assert image_from_field(f"data:;base64,{TEXT}") == b"\x00\xffimage"
    assert "base64" in str(image_from_field("/etc/passwd.png"))
    assert isinstance(image_from_field(["x"]), ImageRejected)
