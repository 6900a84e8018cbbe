"""The keys of a running server, which reloads the keys file when it changes."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from mlcd.errors import ConfigInvalid, Unavailable
from mlcd.service.errors import Unauthorized
from mlcd.service.keys.file import Key, KeySet, read_keys
from mlcd.service.timings import KEYS_POLL_S

_log = logging.getLogger("mlcd.service")


class KeyRing:
    """The keys in a file; `watch` reloads them. Use from one event loop."""

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises ConfigInvalid if it cannot be read or lacks a valid key."""
        self._path = path
        self._stamp = _read_stamp(path)
        self._keys: KeySet | None = read_keys(path)
        if not any(key.state(_now()) == "valid" for key in self._keys.keys):
            raise ConfigInvalid(
                f"the keys file {path} must contain a valid key",
                remedy="create one with `mlcd keys create`",
            )

    def identify(self, token: str | None) -> Key:
        """Returns the key of a client's token.

        Raises Unauthorized if the token is missing or is unknown, expired or revoked. Raises
        Unavailable while the file cannot be read, because a key may have been revoked.
        """
        if token is None:
            raise Unauthorized(
                "an API key is required",
                remedy="send it as Authorization: Bearer KEY or X-API-Key: KEY",
            )
        return _require_valid(self._readable_keys.find(token))

    def find(self, key_id: str | None) -> Key:
        """Returns the key with an id, for work that the server does on behalf of the client.

        Raises Unauthorized for None and for a key that is not valid any more, and Unavailable like
        `identify`.
        """
        keys = self._readable_keys.keys
        return _require_valid(next((key for key in keys if key.id == key_id), None))

    @property
    def _readable_keys(self) -> KeySet:
        if self._keys is None:
            raise Unavailable("the server cannot read its keys", remedy="see its log")
        return self._keys

    async def watch(self) -> None:
        """Reloads the file whenever it changes, until canceled."""
        # On a separate thread: a revoked key must not stay valid because other threads are busy.
        with ThreadPoolExecutor(1, "keys") as reading:
            in_thread = partial(asyncio.get_running_loop().run_in_executor, reading)
            while True:
                await asyncio.sleep(KEYS_POLL_S)
                stamp = await in_thread(_read_stamp, self._path)
                if stamp != self._stamp:
                    # The stamp is taken before the file is read, so a change in between is
                    # noticed next time.
                    self._keys, self._stamp = await in_thread(_read, self._path), stamp


def _require_valid(key: Key | None) -> Key:
    state = None if key is None else key.state(_now())
    if key is None or state != "valid":
        raise Unauthorized(
            f"the API key is {state or 'unknown'}", remedy="use another key", shown=True
        )
    return key


def _read(path: Path) -> KeySet | None:
    try:
        return read_keys(path)
    except ConfigInvalid as error:
        _log.error("%s; every key is refused until the file can be read", error)
        return None


def _read_stamp(path: Path) -> tuple[int, ...] | None:
    """Returns a stamp that changes with the content, because each change replaces the file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size


def _now() -> datetime:
    return datetime.now(UTC)
