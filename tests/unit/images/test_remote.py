"""Shards and folders in a store that counts requests, fails, lies and goes away."""

import base64
import hashlib
import io
import tarfile
import threading
import zlib

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mlcd.errors import Conflict, ImageRejected, InvalidInput, NotFound, Unavailable
from mlcd.images import read_ahead, remote_files, tar_spans
from mlcd.images.checksums import read_checksum
from mlcd.images.folder import FolderSource
from mlcd.images.tar import TarSource
from mlcd.store_errors import translate_error

ROWS = 40


class Store(MemoryFileSystem):
    """A store. failing: errors that the next requests raise. facts: what a HEAD tells besides."""

    cachable = False

    def __init__(self):
        super().__init__()
        self.store, self.pseudo_dirs = {}, [""]
        self.requests, self.failing, self.facts, self.now, self.most = [], [], {}, 0, 0
        self._lock = threading.Lock()

    def cat_file(self, path, start=None, end=None, **_):
        with self._lock:
            self.requests.append((path, start, end))
            self.now += 1
            self.most = max(self.most, self.now)
            failure = self.failing.pop(0) if self.failing else None
        try:
            threading.Event().wait(0.001)
            if failure is not None:
                raise failure
            return super().cat_file(path, start=start, end=end)
        finally:
            with self._lock:
                self.now -= 1

    def info(self, path, **_):
        return super().info(path) | self.facts


def member(number, size=1000):
    return number.to_bytes(2, "big") * (size // 2)


def shard(num, *, size=1000, links=()):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for number in range(num):
            info = tarfile.TarInfo(f"{number:03d}.png")
            info.size = size
            archive.addfile(info, io.BytesIO(member(number, size)))
        for name, target in links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.LNKTYPE, target
            archive.addfile(info)
    return buffer.getvalue()


@pytest.fixture
def store(monkeypatch):
    """Two shards; ranges are small, and nobody waits."""
    monkeypatch.setattr(tar_spans, "RANGE_BYTES", 8192)
    monkeypatch.setattr(remote_files, "RANGE_BYTES", 8192)
    monkeypatch.setattr(tar_spans, "_MOST_BETWEEN", 2048)
    monkeypatch.setattr(remote_files.time, "sleep", lambda _: None)
    store = Store()
    for name in ("a", "b"):
        store.pipe_file(f"/{name}.tar", shard(ROWS, links=[("999.png", "000.png")]))
    return store


def source(store):
    return TarSource("memory://", store, ["/a.tar", "/b.tar"])


EXPECTED = ([member(number) for number in range(ROWS)] + [member(0)]) * 2


def test_shards_are_read_in_ranges_of_many_images(store):
    images = source(store)
    assert len(images.entries) == len(EXPECTED)
    store.requests.clear()
    with images.ahead(images.entries):
        assert [images.read(entry) for entry in images.entries] == EXPECTED
    whole = 2 * len(shard(ROWS))
    assert len(store.requests) < len(EXPECTED) / 3
    assert sum(end - start for _, start, end in store.requests) < 1.1 * whole
    assert 1 < store.most <= remote_files.CONNECTIONS
    assert [images.read(entry) for entry in images.entries] == EXPECTED  # nobody announced these


def test_an_announcement_is_kept_in_any_order_and_within_another(store):
    images = source(store)
    with images.ahead(images.entries), images.ahead(images.entries[:1]):
        found = [images.read(entry) for entry in reversed(images.entries)]
    assert found == EXPECTED[::-1]


def test_what_is_on_its_way_is_bounded(store, monkeypatch):
    monkeypatch.setattr(read_ahead, "_MOST_BYTES", 20_000)
    images = source(store)
    entries = images.entries
    store.requests.clear()
    with images.ahead(entries):
        for number, entry in enumerate(entries):
            assert images.read(entry) == EXPECTED[number]
            asked = sum(end - start for _, start, end in store.requests)
            assert asked <= 1536 * (number + 1) + 20_000 + 2 * 8192  # a header before each


def test_a_store_that_fails_for_a_while_is_asked_again(store):
    store.failing = [OSError(16, "SlowDown"), TimeoutError(), ConnectionResetError(), ValueError()]
    images = source(store)
    assert len(images.entries) == len(EXPECTED)
    store.failing = [OSError(121, "InternalError")] * 9
    with images.ahead(images.entries):
        assert [images.read(entry) for entry in images.entries] == EXPECTED
    assert store.failing == []


def test_a_store_that_keeps_failing_is_given_up_naming_the_shard(store, monkeypatch):
    images = source(store)
    entries = images.entries
    monkeypatch.setattr(remote_files, "_PATIENCE_S", 1.0)
    store.failing = [OSError(16, "SlowDown")] * 10**4
    with images.ahead(entries), pytest.raises(Unavailable) as raised:
        images.read(entries[0])
    assert raised.match(r"memory:///a\.tar cannot be reached \(OSError\)")
    assert raised.match("run the same command again")
    assert len(store.failing) > 9900


def test_a_shard_that_went_away_ends_the_work_and_an_object_that_did_fails_alone(store):
    images = source(store)
    entries = images.entries
    store.rm_file("/b.tar")
    with images.ahead(entries):
        assert images.read(entries[ROWS]) == member(0)
        with pytest.raises(NotFound, match=r"memory:///b\.tar does not exist"):
            images.read(entries[-1])
    for name in ("x", "y"):
        store.pipe_file(f"/folder/{name}.png", name.encode())
    folder = FolderSource("memory://folder", store, "/folder")
    first, second = folder.entries
    store.rm_file("/folder/y.png")
    with folder.ahead(folder.entries):
        assert folder.read(first) == b"x"
        with pytest.raises(ImageRejected, match="cannot be read"):
            folder.read(second)


def test_a_shard_that_is_replaced_meanwhile_ends_the_work(store):
    store.facts = {"ETag": '"1"'}
    images = source(store)
    with images.ahead(images.entries):
        assert images.read(images.entries[0]) == member(0)
    store.facts = {"etag": "1", "LastModified": "later"}  # the same, in other words
    with images.ahead(images.entries), images.ahead(images.entries[:1]):
        images.read(images.entries[0])
    store.facts = {"ETag": '"2"'}
    with (
        pytest.raises(
            Conflict, match=r"/a\.tar of memory:// has changed since it was listed: begin"
        ),
        images.ahead(images.entries),
    ):
        images.read(images.entries[0])


def test_a_shard_that_got_shorter_fails_image_by_image(store):
    images = source(store)
    entries = images.entries
    store.pipe_file("/a.tar", store.cat_file("/a.tar")[:10_000])
    with images.ahead(entries):
        assert images.read(entries[0]) == member(0)
        with pytest.raises(ImageRejected, match="ends inside"):
            images.read(entries[ROWS - 1])


def test_a_server_that_ignores_ranges_is_told(store, monkeypatch):
    images = source(store)
    entries = images.entries
    whole = store.cat_file("/a.tar")
    monkeypatch.setattr(store, "cat_file", lambda *_, **__: whole)
    with images.ahead(entries), pytest.raises(InvalidInput, match=r"a\.tar comes as a whole"):
        images.read(entries[0])


@pytest.mark.parametrize("kind", ["md5", "crc32", "parts", "keys of others"])
def test_a_shard_is_compared_with_the_checksum_of_its_store(store, monkeypatch, kind):
    data = store.cat_file("/a.tar")
    facts = {
        "md5": {"ETag": f'"{hashlib.md5(data).hexdigest()}"'},
        "crc32": {"ChecksumCRC32": base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()},
        "parts": {"ETag": '"0123456789abcdef0123456789abcdef-2"', "ChecksumCRC32": "AAAA-2"},
        "keys of others": {"ETag": f'"{"0" * 32}"', "ServerSideEncryption": "aws:kms"},
    }[kind]
    monkeypatch.setattr(Store, "call_s3", lambda *_, **__: facts, raising=False)
    images = TarSource("memory://", store, ["/a.tar"])
    assert len(images.entries) == ROWS + 1
    assert (read_checksum(store, "/a.tar") is None) == (kind in ("parts", "keys of others"))
    damaged = bytearray(data)
    damaged[700] ^= 1
    store.pipe_file("/a.tar", bytes(damaged))
    again = TarSource("memory://", store, ["/a.tar"])
    if kind in ("parts", "keys of others"):
        assert len(again.entries) == ROWS + 1
    else:
        with pytest.raises(InvalidInput, match=r"a\.tar differs from the (MD5|CRC32) that its st"):
            again.entries  # noqa: B018


def test_a_streamed_file_reads_as_a_file_does(store):
    data = store.cat_file("/a.tar")
    with remote_files.open_file(store, "/a.tar") as file:
        assert file.read(10) == data[:10]
        assert (file.seek(-4, 1), file.read(4)) == (6, data[6:10])
        assert (file.seek(20_000), file.read(9000)) == (
            20_000,
            data[20_000:29_000][: 24576 - 20_000],
        )
        file.seek(0, 2)
        assert (file.tell(), file.read(5)) == (len(data), b"")
        file.seek(0)
        with pytest.raises(OSError, match="went back too far"):
            file.read(1)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError("x"), "s3://b/x does not exist: check the bucket"),
        (PermissionError("SECRET"), "access to s3://b/x was denied: set the store's credentials"),
        (type("NoCredentialsError", (Exception,), {})("SECRET"), "s3://b/x requires credentials"),
        (type("HttpError", (Exception,), {"code": 404})("SECRET"), "s3://b/x does not exist"),
        (
            type("AzureError", (Exception,), {"status_code": 403})("SECRET"),
            "to s3://b/x was denied",
        ),
        (type("AnyError", (Exception,), {"code": 503})("SECRET"), "s3://b/x cannot be reached"),
        (
            OSError(5, "SECRET"),
            r"s3://b/x cannot be reached \(OSError\): see whether its store is up",
        ),
    ],
)
def test_errors_of_a_store_are_one_line_without_its_words(error, message):
    found = translate_error("s3://b/x", error)
    with pytest.raises(type(found), match=message):
        raise found
    assert "SECRET" not in str(found)
