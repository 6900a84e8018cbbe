"""The pages that the server has for people, in a real browser that can reach nothing but the server."""

import shutil

import pytest

from tests.browser.chromium import browsing
from tests.integration.conftest import client, picture, server, stored

__all__ = ["client", "picture", "server", "stored"]

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("chromium is not installed")
    with browsing(program, tmp_path_factory.mktemp("chromium")) as page:
        yield page


def foreign(page, server):
    return [
        url for url in page.urls if not url.startswith((f"{server}/", "data:", f"blob:{server}/"))
    ]


def test_what_the_browser_refuses_is_noticed(page, server):
    page.open(f"{server}/docs")
    page.value("fetch('http://127.0.0.1:9/').catch(() => 0)")
    page.until("true")
    assert any("Content Security Policy" in problem for problem in page.problems)


def test_the_api_document_is_shown_and_tried_out_without_a_network(page, server, client):
    page.open(f"{server}/docs")
    paths = client.get("/openapi.json").json()["paths"]
    shown = page.until("document.querySelectorAll('.opblock').length")
    assert shown == sum(len(operations) for operations in paths.values())
    block = "[...document.querySelectorAll('.opblock')].find(b => b.querySelector('[data-path=\"/v1/info\"]'))"
    for button in (".opblock-summary-control", ".execute"):
        page.until(f"(found => found && (found.click(), true))({block}.querySelector('{button}'))")
    fingerprint = client.get("/v1/info").json()["fingerprint"]
    page.until(f"{block}.innerText.includes('{fingerprint}')")
    assert page.problems == []
    assert foreign(page, server) == []


def test_the_explorer_labels_and_searches_an_image(page, server, picture, digits):
    page.open(f"{server}/")
    page.until("document.getElementById('model').textContent.includes('dimension')")
    page.choose("#file", digits / picture[0])
    page.until("document.querySelectorAll('#labels tr').length == 8")
    page.until("document.querySelectorAll('#matches tr').length == 10")
    assert page.value("document.querySelector('#matches td').textContent") == picture[0]
    assert page.value("document.getElementById('shown').naturalWidth") > 0
    assert page.value("document.getElementById('error').textContent") == ""
    assert page.problems == []
    assert foreign(page, server) == []


def test_the_explorer_says_what_is_wrong_with_a_file(page, server, tmp_path):
    (tmp_path / "note.png").write_text("no image")
    page.open(f"{server}/")
    page.choose("#file", tmp_path / "note.png")
    assert "JPEG" in page.until("document.getElementById('error').textContent")
    assert foreign(page, server) == []
