"""The pages that the server has for people, in a real browser that can reach nothing but the
server.
"""

import pytest

from tests.integration.conftest import client, server

__all__ = ["client", "server"]

pytestmark = [pytest.mark.browser, pytest.mark.slow]


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
    # The blocks come one tag after the other.
    expected = sum(len(operations) for operations in paths.values())
    page.until(f"document.querySelectorAll('.opblock').length >= {expected}")
    assert page.count(".opblock") == expected
    block = (
        "[...document.querySelectorAll('.opblock')].find(b => "
        "b.querySelector('[data-path=\"/v1/info\"]'))"
    )
    click = "(found => found && (found.click(), true))"
    page.until(f"{click}({block}.querySelector('.opblock-summary-control'))")
    # Before an operation is read whole there may be a button, which finds no operation.
    page.until(f"{block}.querySelector('.responses-table')")
    page.until(f"{click}({block}.querySelector('.execute'))")
    fingerprint = client.get("/v1/info").json()["fingerprint"]
    page.until(f"{block}.innerText.includes('{fingerprint}')")
    assert page.problems == []
    assert foreign(page, server) == []
