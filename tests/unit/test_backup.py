"""`mlcd backup` and `mlcd restore`: whole, verified, and never over something that is there."""

import json
import shutil
import sqlite3
import threading
from collections import Counter
from contextlib import closing

import numpy as np
import pytest

from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.collections.store import Collections
from mlcd.errors import ArtifactInvalid, Conflict, InvalidInput, NotFound
from mlcd.images.thumbnail import Thumbnail
from mlcd.pipelines.backup import back_up, restore
from mlcd.service.keys.usage_stores import SqliteUsage, today
from mlcd.types import unit_rows
from tests.conftest import call_mlcd, run_mlcd, run_python, succeed

FINGERPRINT, DIMENSION = "f" * 64, 8
DAY = today()
USAGE = {(DAY.isoformat(), "0123abcd"): Counter(requests=2, images=5)}
VECTORS = unit_rows(np.random.default_rng(0).standard_normal((200, DIMENSION)))


def items(start, stop):
    return [
        Item(f"i{n}", VECTORS[n], {"n": n}, Thumbnail(f"picture {n}".encode() * 9))
        for n in range(start, stop)
    ]


@pytest.fixture
def state(tmp_path):
    """A server's state, and other files beside it."""
    state = tmp_path / "state"
    with Collections.open(state / "collections") as store:
        for name in ("a", "b"):
            collection, _ = store.create(name, fingerprint=FINGERPRINT, dimension=DIMENSION)
            collection.add(items(0, 50))
            collection.reindex()
            collection.add(items(50, 60))
            collection.delete("i3")
    (state / "jobs").mkdir()
    with closing(sqlite3.connect(state / "jobs" / "queue.sqlite")) as connection:
        connection.execute("CREATE TABLE jobs (id)")
        connection.execute("INSERT INTO jobs VALUES (7)")
        connection.commit()
    SqliteUsage(state / "usage.sqlite", 400).add("b1", USAGE)
    (state / "names").mkdir()
    (state / "names" / "0a.json").write_text("{}")
    (state / "names" / ".lock").touch()
    (state / "keys.json").write_text('{"keys": []}')
    (state / "keys.json").chmod(0o600)
    (state / "model").mkdir()
    (state / "model" / "weights").write_text("large")
    (state / "collections" / ".x.deleted").mkdir()
    (state / "collections" / "x.partial").mkdir()
    return state


def content(state, name):
    with Collection.open(state / "collections" / name, background=False) as collection:
        found = {item.id: item.metadata for block in collection.items() for item in block}
        pictures = {item_id: collection.thumbnail(item_id) for item_id in found}
        return found, pictures, collection.describe().indexed, collection.describe().index_damaged


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_restored_backup_is_the_state_without_what_is_derived(state, tmp_path):
    out, again = tmp_path / "backups" / "monday", tmp_path / "again"
    made = back_up(state, out)
    assert (made.items, made.queue, made.keys, made.left_out) == (
        {"a": 59, "b": 59},
        True,
        True,
        {},
    )
    assert restore(out, again) == made
    expected = [
        *(
            f"collections/{name}/{part}"
            for name in ("a", "b")
            for part in (
                "index/00000001/manifest.json",
                "index/00000001/rows.npy",
                "index/00000001/vectors.npy",
                "items.sqlite",
                "lock",
                "thumbnails.sqlite",
            )
        ),
        "jobs/queue.sqlite",
        "keys.json",
        "names/0a.json",
        "usage.sqlite",
    ]
    assert files(again) == sorted(expected)
    assert files(out) == sorted([*expected, "backup.json"])
    assert (again / "keys.json").stat().st_mode & 0o777 == 0o600
    for name in ("a", "b"):
        assert content(again, name) == content(state, name)
    with closing(sqlite3.connect(again / "jobs" / "queue.sqlite")) as connection:
        assert connection.execute("SELECT id FROM jobs").fetchall() == [(7,)]
    assert SqliteUsage(again / "usage.sqlite", 400).read(DAY, DAY) == USAGE


def test_new_items_of_a_restored_collection_have_their_own_vectors(state, tmp_path):
    """An index younger than the ledger would know the rows that they get."""
    back_up(state, tmp_path / "out")
    restore(tmp_path / "out", tmp_path / "again")
    path = tmp_path / "again" / "collections" / "a"
    with Collection.open(path, background=False) as collection:
        collection.add(items(100, 150))
    with Collection.open(path, background=False) as collection:
        for n in range(100, 150):
            assert collection.embedding_of(f"i{n}")[0] == pytest.approx(VECTORS[n], abs=1e-6)


def test_a_backup_under_three_writers_has_every_acknowledged_item_and_none_by_half(tmp_path):
    state, ended = tmp_path / "state", threading.Event()
    acknowledged = [[], [], []]
    with Collections.open(state / "collections") as store:
        collection, _ = store.create("a", fingerprint=FINGERPRINT, dimension=DIMENSION)

        def write(writer):
            while not ended.is_set():
                start = len(acknowledged[writer])
                added = [
                    Item(f"{writer}/{n}", VECTORS[n % 200], {"n": n})
                    for n in range(start, start + 10)
                ]
                collection.add(added)
                acknowledged[writer] += [item.id for item in added]

        writers = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
        for thread in writers:
            thread.start()
        try:
            before = []
            for number in range(2):
                before.append([item_id for ids in list(acknowledged) for item_id in list(ids)])
                # in a process of its own, as SQLite's locks belong to processes
                succeed("backup", state, tmp_path / f"out{number}", run=run_mlcd)
        finally:
            ended.set()
            for thread in writers:
                thread.join()
    for number, ids in enumerate(before):
        restore(tmp_path / f"out{number}", tmp_path / f"again{number}")
        with Collections.open(tmp_path / f"again{number}" / "collections") as store:
            restored = store.get("a")
            assert set(ids) <= {item.id for block in restored.items() for item in block}
            assert len(restored) % 10 == 0  # no request by half
            restored.check_vectors()


def test_a_collection_that_is_deleted_or_made_anew_meanwhile_stops_no_backup(state, tmp_path):
    ended, path = threading.Event(), state / "collections" / "a"

    def replace():
        with Collections.open(state / "collections") as store:
            while not ended.is_set():
                store.delete("a")
                collection, _ = store.create("a", fingerprint=FINGERPRINT, dimension=DIMENSION)
                collection.add(items(60, 70))

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        done = call_mlcd("backup", state, tmp_path / "out", "--json")
    finally:
        ended.set()
        thread.join()
    assert "Traceback" not in done.stderr
    assert (tmp_path / "out" / "backup.json").is_file(), path
    restore(tmp_path / "out", tmp_path / "again")
    with Collections.open(tmp_path / "again" / "collections") as store:
        assert len(store.get("b")) == 59
        assert store.unusable() == {}


def test_a_damaged_part_is_left_out_and_named_and_the_rest_is_there(state, tmp_path):
    (state / "collections" / "a" / "items.sqlite").write_bytes(b"no ledger" * 1000)
    (state / "jobs" / "queue.sqlite").write_bytes(b"no queue" * 1000)
    done = call_mlcd("backup", state, tmp_path / "out")
    assert done.returncode == 2
    assert "lacks 2 damaged part(s), first collections/a" in done.stderr
    assert done.stderr.count("\n") == 1
    made = restore(tmp_path / "out", tmp_path / "again")
    assert made.left_out.keys() == {"collections/a", "jobs/queue.sqlite"}
    assert content(tmp_path / "again", "b")[0].keys() == content(state, "b")[0].keys()


@pytest.mark.parametrize(
    "name", ["collections/a/items.sqlite", "keys.json", "collections/b/index/00000001/rows.npy"]
)
def test_a_backup_with_a_changed_or_missing_file_is_not_restored(state, tmp_path, name):
    back_up(state, tmp_path / "out")
    path = tmp_path / "out" / name
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ArtifactInvalid, match=f"{name} differs"):
        restore(tmp_path / "out", tmp_path / "again")
    path.unlink()
    with pytest.raises(ArtifactInvalid, match=f"{name} is missing"):
        restore(tmp_path / "out", tmp_path / "again")
    assert files(tmp_path / "again") == []


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"files": {}}'])
def test_what_is_not_a_finished_backup_is_not_restored(state, tmp_path, text):
    back_up(state, tmp_path / "out")
    (tmp_path / "out" / "backup.json").unlink()
    if text is not None:
        (tmp_path / "out" / "backup.json").write_text(text)
    with pytest.raises(NotFound if text is None else ArtifactInvalid):
        restore(tmp_path / "out", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_nothing_is_written_over_what_is_there(state, tmp_path):
    back_up(state, tmp_path / "out")
    for call in (
        lambda: back_up(state, tmp_path / "out"),
        lambda: restore(tmp_path / "out", state),
        lambda: back_up(state, state / "model" / ".." / ".." / "out"),
        lambda: restore(tmp_path / "out", tmp_path / "out" / "backup.json"),
    ):
        with pytest.raises(Conflict, match=r"exists|not empty"):
            call()
    with pytest.raises(InvalidInput, match="outside"):
        back_up(state, state / "backups" / "1")
    with pytest.raises(NotFound):
        back_up(tmp_path / "nothing", tmp_path / "other")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="must contain collections"):
        back_up(tmp_path / "empty", tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "out", "state"]


def test_an_empty_volume_takes_a_backup(state, tmp_path):
    back_up(state, tmp_path / "out")
    (tmp_path / "volume" / "lost+found").mkdir(parents=True)
    restore(tmp_path / "out", tmp_path / "volume")
    assert content(tmp_path / "volume", "a")[0].keys() == content(state, "a")[0].keys()


def test_a_full_disk_leaves_no_backup(state, tmp_path):
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000));"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "from mlcd.cli import main; sys.argv = ['mlcd', 'backup', *sys.argv[1:]]; main()"
    )
    done = run_python(script, state, tmp_path / "out", check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "disk is full" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]


def test_the_command_says_what_it_has_copied(state, tmp_path):
    done = call_mlcd("backup", state, tmp_path / "out", "--json")
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["items"], told["queue"], told["keys"]) == ({"a": 59, "b": 59}, True, True)
    shutil.rmtree(state)
    done = call_mlcd("restore", tmp_path / "out", state)
    assert "2 collections of 118 items, the job queue, keys" in done.stdout
    assert files(tmp_path / "out")[0] == "backup.json"
