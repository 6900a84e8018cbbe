"""The keys file: a JSON file with the API keys, each as a hash of its random token."""

import contextlib
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self, get_args

from pydantic import AwareDatetime, BaseModel, Field, ValidationError, model_validator

from mlcd.artifacts.disk import hold_lock, sync_path
from mlcd.errors import ConfigInvalid, NotFound

Scope = Literal["embed", "search", "write", "jobs", "admin"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)  # admin includes all others

# A prefix for scanners that search for leaked secrets, the public id, 256 random bits.
_TOKEN: Final = re.compile(r"mlcd_([0-9a-f]{8})_[0-9a-f]{64}")
_ID_BYTES: Final = 4
_SECRET_BYTES: Final = 32
_MODE: Final = 0o600
_NO_DIGEST: Final = "0" * 64  # compared with if the id is unknown


class Key(BaseModel, frozen=True, extra="forbid"):
    """A key. Times have time zones. rate: images a minute, None for no limit. collections: names of
    the collections that the key sees, None for all.
    """

    MAX_NAME: ClassVar = 100

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1)]
    rate: Annotated[int, Field(gt=0)] | None = None
    collections: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None

    def state(self, now: datetime) -> Literal["valid", "revoked", "expired"]:
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and now >= self.expires else "valid"

    def sees(self, collection: str) -> bool:
        return self.collections is None or collection in self.collections

    def grants(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes


class KeySet(BaseModel, frozen=True, extra="forbid"):
    """The content of a keys file."""

    version: Literal[1] = 1
    keys: tuple[Key, ...] = ()

    @model_validator(mode="after")
    def _ids_are_unique(self) -> Self:
        if len({key.id for key in self.keys}) < len(self.keys):
            raise ValueError("two keys have the same id")
        return self

    @cached_property
    def _by_id(self) -> dict[str, Key]:
        return {key.id: key for key in self.keys}

    def find(self, token: str) -> Key | None:
        """Returns the key of a token, also if it is revoked or expired.

        The time does not depend on the token, except on its length.
        """
        match = _TOKEN.fullmatch(token)
        key = self._by_id.get(match[1]) if match else None
        is_same = hmac.compare_digest(_hash_token(token), key.sha256 if key else _NO_DIGEST)
        return key if is_same else None


def read_keys(path: Path) -> KeySet:
    """Reads the file. Raises ConfigInvalid for a missing, unreadable or invalid file."""
    try:
        return KeySet.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise ConfigInvalid(
            f"the keys file {path} does not exist", remedy="create one with `mlcd keys create`"
        ) from error
    except OSError as error:
        raise ConfigInvalid(
            f"the keys file {path} cannot be read", remedy="give this user read permission"
        ) from error
    except ValidationError:
        # Without the cause, because pydantic's text contains parts of the file.
        raise ConfigInvalid(
            f"{path} is not a keys file", remedy="write it with `mlcd keys` only"
        ) from None


def create_key(
    path: Path,
    name: str,
    *,
    scopes: Sequence[Scope],
    now: datetime,
    rate: int | None = None,
    collections: Sequence[str] | None = None,
    expires: datetime | None = None,
) -> tuple[Key, str]:
    """Adds a new key to the file and returns it with its token, which is not stored.

    Creates the file if it is missing. Raises ConfigInvalid for a file that cannot be written.
    """
    with _lock(path):
        key_set = read_keys(path) if path.exists() else KeySet()
        key_id = _new_id(key_set)
        token = f"mlcd_{key_id}_{secrets.token_hex(_SECRET_BYTES)}"
        key = Key(
            id=key_id,
            name=name,
            sha256=_hash_token(token),
            scopes=tuple(scope for scope in SCOPES if scope in scopes),
            rate=rate,
            collections=None if collections is None else tuple(dict.fromkeys(collections)),
            created=now,
            expires=expires,
        )
        _write(path, KeySet(keys=(*key_set.keys, key)))
    return key, token


def revoke_key(path: Path, key_id: str, *, now: datetime) -> Key:
    """Revokes a key and returns it; a key that is already revoked does not change.

    Raises NotFound for an unknown id, ConfigInvalid for a file that cannot be read or written.
    """
    read_keys(path)  # raises for a missing file before the lock file is created
    with _lock(path):
        keys_by_id = {key.id: key for key in read_keys(path).keys}
        if key_id not in keys_by_id:
            raise NotFound("unknown key id", remedy="`mlcd keys list` shows the ids")
        if keys_by_id[key_id].revoked is None:
            keys_by_id[key_id] = keys_by_id[key_id].model_copy(update={"revoked": now})
            _write(path, KeySet(keys=tuple(keys_by_id.values())))
        return keys_by_id[key_id]


def _new_id(key_set: KeySet) -> str:
    used_ids = {key.id for key in key_set.keys}
    while (key_id := secrets.token_hex(_ID_BYTES)) in used_ids:
        pass
    return key_id


def _hash_token(token: str) -> str:
    """Returns a fast hash of a token: 256 random bits cannot be guessed, so it need not be slow."""
    return hashlib.sha256(token.encode()).hexdigest()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Locks the file, so that only one process writes it."""
    try:
        with hold_lock(path.with_name(f".{path.name}.lock"), mode=_MODE):
            yield
    except OSError as error:
        raise _unwritable(path) from error


def _write(path: Path, keys: KeySet) -> None:
    """Replaces the file atomically; only this user may read it."""
    path = path.resolve()  # replaces the target of a symbolic link, not the link
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(keys.model_dump_json(indent=2, exclude_none=True) + "\n")
            file.flush()
            os.fsync(descriptor)
        draft.rename(path)
        sync_path(path.parent)
    except OSError as error:
        raise _unwritable(path) from error


def _unwritable(path: Path) -> ConfigInvalid:
    return ConfigInvalid(
        f"the keys file {path} cannot be written",
        remedy="use a folder that this user may write to",
    )
