"""Images at the URLs in a table or a list, of hosts that answer, fail, are slow or lead inside."""

import time
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlcd.errors import ConfigInvalid, ImageRejected, InvalidInput
from mlcd.fetching import downloads as downloads_module
from mlcd.fetching.url_options import UrlOptions
from mlcd.images.sources import open_source
from tests.image_host import ImageHost, ok, redirect, status
from tests.saved_datasets import write_saved

HUSH = "hush-7f3a"


def options(*hosts, column="url", names="127.0.0.1,localhost", **given):
    ports = ",".join(str(host.port) for host in hosts)
    return UrlOptions(column, names, "127.0.0.1/32,::1/128", ports, **given)


def table(path, urls, **columns):
    pq.write_table(pa.table({"url": pa.array(urls, pa.string()), **columns}), path)
    return str(path)


def outcomes(source):
    def read(entry):
        try:
            return source.read(entry)
        except ImageRejected as rejection:
            return rejection.reason, rejection.message

    with source.ahead(source.entries), ThreadPoolExecutor(2) as pool:
        found = dict(zip(source.entries.keys(), pool.map(read, source.entries), strict=True))
    assert HUSH not in str(found)
    return found


def test_each_broken_url_has_its_reason_and_nothing_private_is_connected_to(tmp_path):
    with ImageHost({}) as inside, ImageHost({"/a": ok(b"a"), "/b": ok(b"b", "text/html")}) as host:
        private = f"http://127.0.0.2:{inside.port}/"
        host.answers |= {"/in": redirect(private), "/500": status(500)}
        urls = [f"{host.url}/{name}" for name in ("a", "b", "in", "500")]
        urls += [f"{host.url}/gone?key={HUSH}", private, f"http://me:{HUSH}@x.example/", None, "?"]
        source = open_source(table(tmp_path / "t.parquet", urls), urls=options(host, inside))
        found = outcomes(source)
        assert inside.asked == []
    refused = ("url-refused", "the URL is not one that can be fetched")
    assert list(found.values()) == [
        b"a",
        ("fetch-failed", f"{host.url}/b: 127.0.0.1 answered with no image"),
        (
            "url-refused",
            f"{host.url}/in: 127.0.0.2:{inside.port} is not an allowed host and port",
        ),
        ("fetch-failed", f"{host.url}/500: 127.0.0.1 answered with 500"),
        ("fetch-failed", f"{host.url}/gone: 127.0.0.1 answered with 404"),
        (
            "url-refused",
            f"{private}: 127.0.0.2:{inside.port} is not an allowed host and port",
        ),
        refused,
        refused,
        refused,
    ]
    assert list(found)[:2] == ["t/00000000", "t/00000001"]


def test_any_public_host_may_be_asked_and_no_other(tmp_path):
    with ImageHost({"/": ok(b"x")}) as host:
        urls = [f"http://127.0.0.1:{host.port}/", "http://10.0.0.1/", "http://169.254.169.254/"]
        everyone = UrlOptions("url", ports=f"80,{host.port}")
        found = outcomes(open_source(table(tmp_path / "t.parquet", urls), urls=everyone))
        assert [reason for reason, _ in found.values()] == ["url-refused"] * 3
        assert all("an address that is not public" in message for _, message in found.values())
        assert host.asked == []


def test_a_slow_host_holds_up_nobody_else_and_costs_its_share(tmp_path):
    """40 images of a host that takes 0.1 s, 8 at a time, among 400 others: 0.5 s are its share."""
    with ImageHost({"/": ok(b"fast")}) as fast, ImageHost({}) as slow:
        slow.answers["/"] = lambda connection: (slow.wait(0.1), connection.sendall(ok(b"slow")))
        here = f"http://localhost:{slow.port}/"
        urls = [here if number % 11 == 0 else f"{fast.url}/" for number in range(440)]
        source = open_source(table(tmp_path / "t.parquet", urls), urls=options(fast, slow))
        started = time.monotonic()
        found = list(outcomes(source).values())
        took_s = time.monotonic() - started
    assert found == [b"slow" if number % 11 == 0 else b"fast" for number in range(440)]
    assert slow.most == 8
    assert took_s < 3  # one after the other takes 4 s, for this host alone


def test_an_answer_that_does_not_come_is_late_and_a_large_one_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(downloads_module, "_MAX_BYTES", 1000)
    with ImageHost({"/large": ok(b"x" * 1001)}) as host:
        host.answers["/late"] = lambda _: host.wait()
        urls = [f"{host.url}/late", f"{host.url}/large"]
        source = open_source(table(tmp_path / "t.parquet", urls), urls=options(host, timeout=0.3))
        late, large = outcomes(source).values()
    assert late == ("fetch-late", f"{host.url}/late: no image within 0.3 s")
    assert large[0] == "too-many-bytes"


def test_images_that_wait_for_their_turn_have_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(downloads_module, "_MAX_BUFFERED_BYTES", 50_000)
    with ImageHost({"/": ok(b"x" * 10_000)}) as host:
        source = open_source(
            table(tmp_path / "t.parquet", [f"{host.url}/"] * 300), urls=options(host)
        )
        with source.ahead(source.entries):
            assert len(source.read(source.entries[0])) == 10_000
            time.sleep(0.2)
            asked = len(host.asked)
            assert [len(source.read(entry)) for entry in source.entries[1:]] == [10_000] * 299
        assert asked <= 300
        assert len(host.asked) == 300


def test_a_list_and_a_saved_dataset_name_urls_too(tmp_path):
    with ImageHost({"/a": ok(b"a"), "/b": ok(b"b")}) as host:
        listed = tmp_path / "urls.txt"
        listed.write_text(f"{host.url}/a\n\n{host.url}/b\nhttps://\n")
        source = open_source(str(listed), urls=options(host, column=None))
        found = outcomes(source)
        assert list(found) == ["urls/00000001", "urls/00000003", "urls/00000004"]
        assert list(found.values())[:2] == [b"a", b"b"]
        with pytest.raises(InvalidInput, match="does not fetch: fetch them with `mlcd embed`"):
            open_source(str(listed))
        listed.write_text(f"{host.url}/a\nb.png\n")
        with pytest.raises(InvalidInput, match="only web URLs"):
            open_source(str(listed), urls=options(host))
        write_saved(tmp_path / "saved", [b"", b""], [0, 1], ["cat", "dog"])
        saved = open_source(str(tmp_path / "saved"), urls=options(host, column="image"))
        with pytest.raises(InvalidInput, match=r"column image of .* must hold texts"):
            saved.entries  # noqa: B018


def test_urls_and_keys_are_the_identity_and_captions_stay(tmp_path):
    options_ = UrlOptions("url")

    def opened(urls, **columns):
        return open_source(table(tmp_path / "t.parquet", urls, **columns), urls=options_)

    first = opened(["http://a.example/1", "http://a.example/2"]).listing_digest()
    other = opened(["http://a.example/1", "http://a.example/3"]).listing_digest()
    assert first != other
    captioned = opened(["http://a.example/1"], key=["k"], caption=["a cat"])
    assert list(captioned.captions()) == [("k", "a cat")]
    assert [entry.class_name for entry in opened(["x"], label=["cat"]).entries] == ["cat"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"column": "link"}, "lacks the column link: give one of url, size"),
        ({"column": "size"}, "must hold texts: give the column of URLs"),
    ],
)
def test_a_wrong_column_is_told(tmp_path, given, message):
    source = open_source(table(tmp_path / "t.parquet", ["x"], size=[1]), urls=UrlOptions(**given))
    with pytest.raises(InvalidInput, match=message):
        source.entries  # noqa: B018


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hosts": "http://x"}, "--url-hosts http://x: a host must be"),
        ({"networks": "10.1.2.3/8", "hosts": "x"}, "--url-networks 10.1.2.3/8: networks are writ"),
        ({"ports": "0"}, "--url-ports 0: ports are numbers from 1 to 65535"),
        ({"networks": "10.0.0.0/8"}, "--url-networks is for hosts that are named"),
        ({"timeout": 0.0}, "--url-timeout is not a time"),
        ({"timeout": float("nan")}, "--url-timeout is not a time"),
    ],
)
def test_options_that_say_nothing_are_told(given, message):
    with pytest.raises(ConfigInvalid, match=message):
        UrlOptions(**given).policy()


def test_a_column_is_for_tables(tmp_path):
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(InvalidInput, match="--url-column is for parquet"):
        open_source(str(tmp_path), urls=UrlOptions("url"))
