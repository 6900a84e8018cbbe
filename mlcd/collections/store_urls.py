"""URLs of the stores of collections."""

from pathlib import Path
from typing import Final, Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from mlcd.collections.item import check_name
from mlcd.errors import ConfigInvalid
from mlcd.locations import check_no_credentials

RemoteKind = Literal["postgresql", "milvus"]
_KINDS: Final[dict[str, RemoteKind]] = {
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "milvus": "milvus",
}
# forms of URLs, for messages and settings
SHAPES: Final[dict[RemoteKind, str]] = {
    "postgresql": "postgresql://HOST/DATABASE",
    "milvus": "milvus://HOST:PORT[/DATABASE]",
}
_DATABASE_OPTIONAL: Final = ("milvus",)


def is_store(place: str) -> bool:
    """Returns whether a place is the URL of a store."""
    scheme, is_url, _ = place.partition("://")
    return bool(is_url) and scheme in _KINDS


def kind_of(url: str) -> RemoteKind:
    """Returns the kind of the store at a URL."""
    return _KINDS[url.partition("://")[0]]


def split_collection(url: str) -> tuple[str, str]:
    """Splits postgresql://HOST/DATABASE/NAME into the URL of the store and NAME.

    Raises ConfigInvalid if NAME is missing, and for credentials, which all users of the machine can
    see on a command line.
    """
    parts = urlsplit(check_no_credentials(url))
    store, _, name = parts.path.rpartition("/")
    if not name or not (store.strip("/") or parts.scheme in _DATABASE_OPTIONAL):
        raise ConfigInvalid(
            f"{describe_store(url)} must name a collection in a database",
            remedy=f"give {SHAPES[kind_of(url)]}/NAME",
        )
    return urlunsplit(parts._replace(path=store)), check_name(unquote(name))


def describe_place(place: str | Path) -> str:
    """Returns a path or a URL as messages may show it."""
    return describe_store(str(place)) if is_store(str(place)) else str(place)


def describe_store(url: str) -> str:
    """Returns the URL without user, password and options."""
    parts = urlsplit(url)
    return f"{kind_of(url)}://{parts.netloc.rpartition('@')[2]}{unquote(parts.path)}"
