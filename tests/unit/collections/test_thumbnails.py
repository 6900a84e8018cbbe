"""The thumbnails of a collection: of the right item, once each, within their bound, whatever
happens.
"""

import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.collections.store import Collections
from mlcd.collections.thumbnail_store import THUMBNAILS
from mlcd.images.thumbnail import Thumbnail
from tests.unit.collections.conftest import DIMENSION, FINGERPRINT

IDS = ["sea/1.png", "Häuser/Straße 7.jpg", "写真/桜.jpg", "a/thumbnail", "x" * 1024]


def picture(name, size=300):
    return Thumbnail(name.encode().ljust(size, b"."))


def item(item_id, vector, name=None, **metadata):
    return Item(item_id, vector, metadata, None if name is None else picture(name))


def check(collection):
    """The totals are those of the tables, and every picture is one that an item shows."""
    with sqlite3.connect(collection.path / THUMBNAILS) as connection:
        shown = dict(connection.execute("SELECT row, digest FROM shown"))
        pictures = {
            digest: (len(data), num)
            for digest, data, num in connection.execute("SELECT * FROM pictures")
        }
        totals = connection.execute("SELECT * FROM totals").fetchone()
    connection.close()
    assert {digest: num for digest, (_, num) in pictures.items()} == {
        digest: [*shown.values()].count(digest) for digest in shown.values()
    }
    assert totals == (len(shown), len(pictures), sum(size for size, _ in pictures.values()))
    ids, _ = collection.rows()
    assert len(shown) == sum(v is not None for v in collection.thumbnail_versions(ids))


def test_equal_pictures_are_kept_once_and_go_with_the_last_item(collection, vectors):
    collection.add([item(f"i{n}", vectors[n], "same") for n in range(3)])
    assert (
        collection.describe_thumbnails().items,
        collection.describe_thumbnails().pictures,
    ) == (
        3,
        1,
    )
    collection.delete("i0")
    assert collection.delete_all(["i1", "i0", "i1"]) == ["deleted", "missing", "missing"]
    assert collection.thumbnail("i2") == picture("same")
    check(collection)
    collection.delete("i2")
    stored = collection.describe_thumbnails()
    assert (stored.items, stored.pictures, stored.bytes) == (0, 0, 0)
    check(collection)


def test_the_bound_refuses_with_the_figure_and_items_are_added_all_the_same(tmp_path, vectors):
    bound = {"max_thumbnail_bytes": 1000}
    with Collection.create(
        tmp_path / "c", fingerprint=FINGERPRINT, dimension=DIMENSION, **bound
    ) as collection:
        outcomes = collection.add([item(f"i{n}", vectors[n], f"p{n}") for n in range(5)])
        assert outcomes == ["created"] * 5
        stored = collection.describe_thumbnails()
        assert (stored.items, stored.bytes, stored.max_bytes, stored.full) == (3, 900, 1000, True)
        assert not collection.takes_thumbnails
        collection.add([item("known", vectors[7], "p0")])  # costs nothing
        assert collection.thumbnail("known") == picture("p0")
        collection.delete("i1")
        assert collection.takes_thumbnails
        assert collection.without_thumbnail() == ["i3", "i4"]
        check(collection)
    with Collection.open(tmp_path / "c", **bound) as collection:
        collection.add_thumbnails({"i3": picture("p3"), "i4": picture("p4")})
        assert collection.without_thumbnail() == ["i4"]
        assert collection.describe_thumbnails().full
        check(collection)


def test_they_are_there_again_after_reopening_for_readers_too(tmp_path, vectors):
    with Collections.open(tmp_path / "store") as store:
        made, _ = store.create("c", fingerprint=FINGERPRINT, dimension=DIMENSION)
        made.add([item(name, vectors[n], name) for n, name in enumerate(IDS)])
    for read_only in (False, True):
        with Collections.open(tmp_path / "store", read_only=read_only) as store:
            assert store.get("c").thumbnail(IDS[1]) == picture(IDS[1])
            assert store.get("c").takes_thumbnails is not read_only


def test_a_folder_that_cannot_be_written_is_read(tmp_path, vectors):
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    with Collection.create(
        tmp_path / "c", fingerprint=FINGERPRINT, dimension=DIMENSION
    ) as collection:
        collection.add([item("a", vectors[0], "a")])
    (tmp_path / "c").chmod(0o500)
    try:
        with Collection.open(tmp_path / "c") as collection:
            assert collection.thumbnail("a") == picture("a")
    finally:
        (tmp_path / "c").chmod(0o700)


def test_what_a_crash_left_of_deleted_items_is_removed(tmp_path, vectors):
    path = tmp_path / "c"
    with Collection.create(path, fingerprint=FINGERPRINT, dimension=DIMENSION) as collection:
        collection.add([item(name, vectors[n], name) for n, name in enumerate(IDS)])
    shutil.copy(path / THUMBNAILS, tmp_path / "before")
    with Collection.open(path) as collection:
        collection.delete_all(IDS[:3])
    shutil.copy(tmp_path / "before", path / THUMBNAILS)
    with Collection.open(path) as collection:
        assert collection.describe_thumbnails().items == 2
        check(collection)


def test_a_damaged_store_costs_the_pictures_and_nothing_else(tmp_path, vectors, caplog):
    path = tmp_path / "c"
    with Collection.create(path, fingerprint=FINGERPRINT, dimension=DIMENSION) as collection:
        collection.add([item(name, vectors[n], name) for n, name in enumerate(IDS)])
    (path / THUMBNAILS).write_bytes(b"no database at all" * 1000)
    with Collection.open(path, read_only=True) as collection:
        assert collection.thumbnail(IDS[0]) is None
    with Collection.open(path) as collection:
        assert len(collection) == len(IDS)
        assert collection.thumbnail_versions(IDS) == [None] * len(IDS)
        assert "damaged" in caplog.text
        collection.add([item(IDS[0], vectors[0], "again")])
        assert collection.thumbnail(IDS[0]) == picture("again")
        check(collection)


def test_a_damaged_picture_is_not_given(collection, vectors):
    collection.add([item("a", vectors[0], "a"), item("b", vectors[1], "b")])
    with sqlite3.connect(collection.path / THUMBNAILS) as connection:
        digest = bytes.fromhex(picture("a").version)
        connection.execute("UPDATE pictures SET picture = x'00' WHERE digest = ?", (digest,))
    connection.close()
    assert collection.thumbnail("a") is None
    assert collection.thumbnail("b") == picture("b")


def test_another_file_in_its_place_is_left_alone(tmp_path, vectors):
    path = tmp_path / "c"
    with Collection.create(path, fingerprint=FINGERPRINT, dimension=DIMENSION):
        pass
    with sqlite3.connect(path / THUMBNAILS) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    with Collection.open(path) as collection:
        collection.add([item("a", vectors[0], "a")])
        assert collection.thumbnail("a") is None
    with sqlite3.connect(path / THUMBNAILS) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]
    connection.close()


def test_two_writers_of_one_id_leave_a_picture_that_fits_its_vector(collection):
    vectors = np.eye(DIMENSION, dtype=np.float32)

    def write(start):
        for n in range(start, start + 60):
            collection.add([item("a", vectors[n % DIMENSION], f"v{n % DIMENSION}")])
            collection.thumbnail("a")

    threads = [threading.Thread(target=write, args=(7 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shown = int(np.argmax(collection.get("a").embedding))
    assert collection.thumbnail("a") == picture(f"v{shown}")
    check(collection)


WRITERS = """
import os, random, sys, threading
from pathlib import Path
import numpy as np
from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.images.thumbnail import Thumbnail

def write(collection, name, start):
    rng = random.Random(start)
    version = start
    while True:
        item_id, version = f"{name}{rng.randrange(30)}", version + 1
        if rng.random() < 0.7:
            vector = np.random.default_rng(version).standard_normal(16)
            picture = Thumbnail(f"{item_id} {version}".encode().ljust(3000, b"."))
            collection.add([Item(item_id, vector, {"version": version}, picture)])
            os.write(1, f"put {item_id} {version}\\n".encode())
        else:
            collection.delete_all([item_id])
            os.write(1, f"delete {item_id} {version}\\n".encode())

collection = Collection.open(Path(sys.argv[1]))
for number, name in enumerate("abc"):
    arguments = (collection, name, int(sys.argv[2]) + number * 10_000_000)
    threading.Thread(target=write, args=arguments, daemon=True).start()
threading.Event().wait()
"""


def test_after_kill_9_every_acknowledged_item_has_its_picture_and_no_other(tmp_path):
    path, rng = tmp_path / "c", random.Random(0)
    Collection.create(path, fingerprint=FINGERPRINT, dimension=DIMENSION).close()
    last = {}
    for number in range(5):
        command = [sys.executable, "-c", WRITERS, path, str(1 + number * 100_000_000)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            lines = [process.stdout.readline()]
            time.sleep(rng.uniform(0.05, 0.5))
            process.kill()
            lines += process.stdout.read().splitlines()
        for line in lines:
            kind, item_id, version = line.decode().split()
            last[item_id] = int(version) if kind == "put" else None
        with Collection.open(path) as collection:
            check(collection)
            ids, _ = collection.rows()
            for item_id in ids:
                version = collection.get(item_id).metadata["version"]
                shown = collection.thumbnail(item_id)
                expected = picture(f"{item_id} {version}", 3000)
                # An item that was not acknowledged may lack its picture.
                assert shown == expected or (shown is None and last.get(item_id) != version)
    assert len(last) > 30
