"""API keys: what is kept of them, and that nothing else is."""

import json
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from mlcd.errors import ConfigInvalid, NotFound
from mlcd.service.keys.file import SCOPES, Key, KeySet, create_key, read_keys, revoke_key
from tests.conftest import call_mlcd, run_mlcd

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.json"


def created(path, name="someone", **given):
    return create_key(path, name, **({"scopes": ["embed"], "now": NOW} | given))


def test_a_token_has_a_prefix_an_id_and_256_random_bits(path):
    key, token = created(path)
    _, another = created(path)
    assert re.fullmatch(rf"mlcd_{key.id}_[0-9a-f]{{64}}", token)
    assert token[14:] != another[14:]


def test_the_file_holds_hashes_only_and_is_the_owner_s_alone(path):
    tokens = [created(path)[1] for _ in range(3)]
    held = path.read_text()
    assert not any(token[14:] in held or token in held for token in tokens)
    assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}
    path.chmod(0o644)
    created(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_token_is_found_by_all_of_it(path):
    pairs = [created(path) for _ in range(3)]
    keys = read_keys(path)
    for key, token in pairs:
        assert keys.find(token) == key
        other = "0" if token[-1] != "0" else "1"
        wrong = [token[:-1], token + "0", token[:-1] + other, token.upper(), " " + token, token[5:]]
        wrong += [key.sha256]
        wrong += [f"mlcd_{key.id}_", f"mlcd_ffffffff_{token[14:]}", "", "\0", "ключ", token + "\n"]
        assert [keys.find(text) for text in wrong] == [None] * len(wrong)
    swapped = f"mlcd_{pairs[0][0].id}_{pairs[1][1][14:]}"
    assert keys.find(swapped) is None


def test_a_key_ends_when_it_is_revoked_or_expires(path):
    key, token = created(path, expires=NOW + timedelta(days=1))
    assert key.state(NOW) == "valid"
    assert key.state(NOW + timedelta(days=1)) == "expired"
    assert revoke_key(path, key.id, now=NOW).revoked == NOW
    assert read_keys(path).find(token).state(NOW) == "revoked"
    assert revoke_key(path, key.id, now=NOW + timedelta(days=9)).revoked == NOW
    with pytest.raises(NotFound, match="mlcd keys list"):
        revoke_key(path, "00000000", now=NOW)


def test_a_scope_grants_itself_and_admin_grants_all(path):
    for scope in SCOPES:
        key, _ = created(path, scopes=[scope])
        granted = {other for other in SCOPES if key.grants(other)}
        assert granted == (set(SCOPES) if scope == "admin" else {scope})


def test_writers_do_not_lose_each_other_s_keys(path):
    code = (
        "import sys; from datetime import UTC, datetime; from pathlib import Path;"
        "from mlcd.service.keys.file import create_key, read_keys, revoke_key\n"
        "path, now = Path(sys.argv[1]), datetime.now(UTC)\n"
        "for _ in range(20):\n"
        "    key, _ = create_key(path, 'x', scopes=['embed'], now=now); read_keys(path)\n"
        "revoke_key(path, key.id, now=now)\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, path]) for _ in range(4)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    states = [key.state(NOW) for key in read_keys(path).keys]
    assert (len(states), states.count("revoked")) == (80, 4)


def test_a_failed_write_leaves_the_file_as_it_was(path, monkeypatch):
    _, token = created(path)
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(ConfigInvalid, match="cannot be written"):
            created(path)
    assert [key.id for key in read_keys(path).keys] == [token[5:13]]
    created(path)
    assert len(read_keys(path).keys) == 2


def test_a_link_to_the_file_stays_one(path, tmp_path):
    link = tmp_path / "link.json"
    created(path)
    link.symlink_to(path)
    created(link)
    assert link.is_symlink()
    assert len(read_keys(path).keys) == 2


@pytest.mark.parametrize(
    "damage", ["", "SECRET", "[]", '{"keys": 1}', '{"version": 2, "keys": []}', '{"SECRET": 1}']
)
def test_a_file_that_is_none_is_refused_and_not_repeated(path, damage):
    path.write_text(damage)
    with pytest.raises(ConfigInvalid, match="is not a keys file") as caught:
        read_keys(path)
    assert "SECRET" not in str(caught.value)
    assert caught.value.__cause__ is None
    with pytest.raises(ConfigInvalid):
        created(path)
    assert path.read_text() == damage


def test_two_keys_with_one_id_are_refused():
    key = {"id": "00000000", "name": "x", "sha256": "0" * 64, "scopes": ["embed"], "created": NOW}
    KeySet(keys=[Key(**key)])
    with pytest.raises(ValueError, match="the same id"):
        KeySet(keys=[Key(**key), Key(**key)])


def test_the_commands_create_list_and_revoke(path, monkeypatch):
    monkeypatch.setenv("MLCD_AUTH__KEYS_FILE", str(path))
    keys = partial(call_mlcd, "keys")
    scopes = ("--scope", "jobs", "--scope", "embed")
    made = keys("create", "the shop", *scopes, "--rate", 600, "--days", 30)
    token = made.stdout.strip()
    key = read_keys(path).find(token)
    expected = (0, "the shop", ("embed", "jobs"), 600)
    assert (made.returncode, key.name, key.scopes, key.rate) == expected
    assert key.expires - key.created == timedelta(days=30)
    assert token[14:] not in made.stderr
    assert key.id in made.stderr
    (listed,) = json.loads(run_mlcd("keys", "list", "--json").stdout)  # writes bytes
    assert (listed["id"], listed["state"], "sha256" in listed) == (key.id, "valid", False)
    assert keys("revoke", key.id).returncode == 0
    shown = keys("list")
    assert "revoked" in shown.stdout
    assert "the shop" in shown.stdout
    assert not any(secret in shown.stdout for secret in (token[14:], key.sha256))


def test_a_key_for_some_collections_is_made_and_listed(path, monkeypatch):
    monkeypatch.setenv("MLCD_AUTH__KEYS_FILE", str(path))
    made = call_mlcd("keys", "create", "two", "--collection", "a,b.1,a")
    key = read_keys(path).find(made.stdout.strip())
    assert (made.returncode, key.collections) == (0, ("a", "b.1"))
    assert [key.sees(name) for name in ("a", "b.1", "b", "A")] == [True, True, False, False]
    everything, _ = create_key(path, "all", scopes=["search"], now=datetime.now(UTC))
    assert everything.sees("anything")
    table = call_mlcd("keys", "list").stdout
    assert "a,b.1" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["create", "x", "--collection", "a,,b"], "'' cannot name a collection"),
        (["create", "x", "--collection", ""], "'' cannot name a collection"),
        (["create", "x", "--collection", "a b"], "'a b' cannot name a collection"),
        (["create", "x", "--collection", "a", "--scope", "admin"], "leave out --collection"),
        (["list"], "set MLCD_AUTH__KEYS_FILE"),
        (
            ["list", "--file", "nowhere.json"],
            "the keys file nowhere.json does not exist: create one with `mlcd keys create`",
        ),
        (["create", "x", "--file", "no/where/keys.json"], "cannot be written"),
        (["create", "x\ny", "--file", "keys.json"], "the name must be one line"),
        (["create", "", "--file", "keys.json"], "the name must be one line"),
        (["create", "x", "--scope", "all", "--file", "keys.json"], "'all' is not one of"),
        (["revoke", "mlcd_00000000_5ec2e7", "--file", "keys.json"], "the id must be 8 letters"),
        (["revoke", "00000000", "--file", "keys.json"], "the keys file keys.json does not exist"),
    ],
)
def test_a_wrong_command_says_what_is_wrong_and_repeats_no_key(
    tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    result = call_mlcd("keys", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "5ec2e7" not in result.stderr
    assert result.stderr.count("\n") <= 4
    assert not list(tmp_path.iterdir())
