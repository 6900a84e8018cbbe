"""Web pages of other origins, which make their visitor's browser ask a server that knows
no keys.
"""

import http.server
import shutil
import threading

import httpx
import pytest

from tests.browser.chromium import browsing
from tests.integration.running import serving

LINK = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


@pytest.fixture(scope="module")
def keyless(tmp_path_factory):
    """A server on this machine that everybody on it may use."""
    state = tmp_path_factory.mktemp("state")
    with serving("fake:latency_ms=1", engine="fake", state_dir=state) as server:
        assert httpx.put(f"{server.url}/v1/collections/some").status_code == 201
        server.row = [1.0] * httpx.get(f"{server.url}/v1/info").json()["dimension"]
        yield server


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:{port}", 200),
        ("here.localhost:8000", 200),
        ("127.0.0.1:{port}", 200),
        ("127.8.9.1", 200),
        ("[::1]:{port}", 200),
        ("evil.example", 421),
        ("evil.example:{port}", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("127.evil.example", 421),
        ("api", 421),
        ("10.0.0.1", 421),
        ("2130706433", 421),
        ("0x7f.1", 421),
        ("[::1", 421),
        ("user@localhost", 421),
        ("localhost:80:80", 421),
        ("\xe9", 421),
    ],
)
def test_a_name_that_the_server_does_not_have_is_refused(keyless, host, status):
    """With a name of its own for this machine's address, a page is of the same origin: DNS
    rebinding.
    """
    given = host.format(port=keyless.port).encode("latin-1")
    answer = httpx.get(f"{keyless.url}/v1/info", headers={b"Host": given})
    assert answer.status_code == status
    if status == 421:
        assert answer.json()["type"] == "urn:mlcd:problem:misdirected-request"
        assert "MLCD_HOSTS" in answer.json()["detail"]
        assert "evil" not in answer.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://proxied.example"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Origin": "http://localhost:{port}"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "anything"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "http://localhost:1"}, 403),
        ({"Origin": "null"}, 403),
        (LINK, 403),  # a form of another page
    ],
)
def test_a_page_of_another_origin_changes_nothing(keyless, headers, status):
    given = {name: value.format(port=keyless.port) for name, value in headers.items()}
    given["Host"] = f"localhost:{keyless.port}"
    answer = httpx.post(
        f"{keyless.url}/v1/collections/some/search",
        json={"embeddings": [keyless.row]},
        headers=given,
    )
    assert answer.status_code == status
    assert status == 200 or "forbidden" in answer.text


def test_a_link_from_another_page_may_be_followed(keyless):
    assert httpx.get(f"{keyless.url}/", headers=LINK).status_code == 200
    assert (
        httpx.get(f"{keyless.url}/", headers=LINK | {"Sec-Fetch-Dest": "iframe"}).status_code == 403
    )


WRITES = ["POST items", "POST search", "POST duplicates", "PATCH items/planted", "PUT "]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_json_is_taken_only_where_the_request_says_that_it_is_json(keyless, write, kind):
    method, path = write.split(" ")
    headers = {} if kind is None else {"Content-Type": kind}
    url = f"{keyless.url}/v1/collections/some/{path}".rstrip("/")
    answer = httpx.request(method, url, content=b"{}", headers=headers)
    assert answer.status_code == 415
    assert httpx.get(f"{keyless.url}/v1/collections/some").json()["items"] == 0


def test_with_keys_the_name_does_not_matter_unless_it_is_stated(attacked, tokens):
    """A page has no key, whatever it is called."""
    headers = {"Authorization": f"Bearer {tokens[2]}", "Host": "models.example"}
    headers |= {"Origin": "https://shop.example"}
    assert httpx.get(f"{attacked.url}/v1/info", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("models.example", 200), ("a.b.example", 200), ("b.example", 421), ("c.example", 421)],
)
def test_names_that_are_stated_are_known(named, host, status):
    assert httpx.get(f"{named.url}/health/live", headers={"Host": host}).status_code == status


@pytest.fixture(scope="module")
def named():
    with serving("fake:latency_ms=1", engine="fake", hosts="models.example, *.b.example") as server:
        yield server


def test_an_open_server_answers_to_addresses_and_to_names_of_its_own_network():
    hosts = {"api:8000": 200, "10.1.2.3:8000": 200, "[fd00::1]": 200, "evil.example": 421}
    with serving("fake:latency_ms=1", engine="fake", auth__mode="open") as server:
        url = f"{server.url}/health/live"
        for host, status in hosts.items():
            assert httpx.get(url, headers={"Host": host}).status_code == status, host


PAGE = (
    b"<!doctype html><title>evil</title><form method=post enctype=text/plain><input name=x></form>"
)


class _Evil(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_):
        """Says nothing."""


@pytest.fixture(scope="module")
def evil():
    """The address of a page of another origin."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Evil) as host:
        threading.Thread(target=host.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{host.server_port}"
        host.shutdown()


@pytest.mark.browser
@pytest.mark.slow
def test_in_a_real_browser_a_page_of_another_origin_adds_nothing_and_reads_nothing(
    keyless, evil, tmp_path
):
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("chromium is not installed")
    with browsing(program, tmp_path, names={"evil.example": "127.0.0.1"}) as page:
        page.open(evil)
        for kind in ("text/plain", ""):
            items = f"[{{id: 'planted', embedding: Array({len(keyless.row)}).fill(1)}}]"
            blob = f"new Blob([JSON.stringify({{items: {items}}})], {{type: '{kind}'}})"
            page.value(
                f"fetch('{keyless.url}/v1/collections/some/items', "
                f"{{method: 'POST', mode: 'no-cors', body: {blob}}})"
                ".catch(() => 0).then(() => 1)"
            )
        page.value(
            f"(form => {{ form.action = '{keyless.url}/v1/collections/some/items'; "
            "form.submit() })(document.forms[0])"
        )
        # DNS rebinding: the page's own name leads to the server.
        page.open(f"http://evil.example:{keyless.port}/v1/collections")
        assert "MLCD_HOSTS" in page.value("document.body.innerText")
        assert "some" not in page.value("document.body.innerText")
        page.value("fetch('/v1/collections/some', {method: 'DELETE'}).catch(() => 0).then(() => 1)")
        # The server's own page still works.
        page.open(f"http://localhost:{keyless.port}/")
        page.until("document.querySelector('.place').textContent.includes('some')")
    described = httpx.get(f"{keyless.url}/v1/collections/some")
    assert (described.status_code, described.json()["items"]) == (200, 0)
