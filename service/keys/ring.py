"""The keys of a running server, which follow the file."""

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
    """The keys of a file, kept current by `watch`. Use from one event loop."""

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises ConfigInvalid if it cannot be read or lacks a valid key."""
        self._path = path
        self._stamp = _stamp_of(path)
        self._keys: KeySet | None = read_keys(path)
        if not any(key.state(_now()) == "valid" for key in self._keys.keys):
            raise ConfigInvalid(
                f"the keys file {path} must hold a valid key", remedy="`mlcd keys create` makes one"
            )

    def identify(self, token: str | None) -> Key:
        """Returns the key of a client's token.

        Raises Unauthorized without a token and for one that is not valid, or no longer. Raises
        Unavailable while the file cannot be read, because a key may have been revoked.
        """
        if token is None:
            raise Unauthorized(
                "an API key is needed",
                remedy="send it as Authorization: Bearer KEY or X-API-Key: KEY",
            )
        return _require_valid(self._readable.find(token))

    def find(self, identity: str | None) -> Key:
        """Returns the key of an id, for work that the client left to the server.

        Raises Unauthorized for a key that is not valid any more, or None, and Unavailable as
        `identify`.
        """
        keys = self._readable.keys
        return _require_valid(next((key for key in keys if key.id == identity), None))

    @property
    def _readable(self) -> KeySet:
        if self._keys is None:
            raise Unavailable("the server cannot read its keys", remedy="its log says why")
        return self._keys

    async def watch(self) -> None:
        """Reads the file whenever it has changed, until cancelled."""
        # A thread of its own: a revoked key must not stay because others are busy.
        with ThreadPoolExecutor(1, "keys") as reading:
            in_thread = partial(asyncio.get_running_loop().run_in_executor, reading)
            while True:
                await asyncio.sleep(KEYS_POLL_S)
                stamp = await in_thread(_stamp_of, self._path)
                if stamp != self._stamp:
                    # The stamp is older than the content: a change in between is seen the next
                    # time.
                    self._keys, self._stamp = await in_thread(_read, self._path), stamp


def _require_valid(key: Key | None) -> Key:
    state = None if key is None else key.state(_now())
    if key is None or state != "valid":
        raise Unauthorized(
            f"the API key is {state or 'not known here'}", remedy="use another", shown=True
        )
    return key


def _read(path: Path) -> KeySet | None:
    try:
        return read_keys(path)
    except ConfigInvalid as error:
        _log.error("%s; every key is refused until it can be read", error)
        return None


def _stamp_of(path: Path) -> tuple[int, ...] | None:
    """Returns a stamp that changes with the content: the file is always replaced as a whole."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size


def _now() -> datetime:
    return datetime.now(UTC)
