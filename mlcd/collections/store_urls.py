"""The URLs of stores of collections."""

from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit, urlunsplit

from mlcd.collections.item import check_name
from mlcd.errors import ConfigInvalid
from mlcd.locations import check_no_credentials

POSTGRES: Final = ("postgresql://", "postgres://")


def is_store(place: str) -> bool:
    """Tells whether a place is a store behind a URL."""
    return place.startswith(POSTGRES)


def split_collection(url: str) -> tuple[str, str]:
    """Returns the store and the name of postgresql://HOST/DATABASE/NAME.

    Raises ConfigInvalid for credentials, which every user of the machine sees on a command line,
    and where there is no name.
    """
    parts = urlsplit(check_no_credentials(url))
    store, _, name = parts.path.rpartition("/")
    if not store.strip("/") or not name:
        raise ConfigInvalid(
            f"{shown_store(url)} names no collection in a database",
            remedy="give postgresql://HOST/DATABASE/NAME",
        )
    return urlunsplit(parts._replace(path=store)), check_name(unquote(name))


def shown_place(place: str | Path) -> str:
    """Returns a path or a URL as messages may show it."""
    return shown_store(str(place)) if is_store(str(place)) else str(place)


def shown_store(url: str) -> str:
    """Returns the URL without user, password and options."""
    parts = urlsplit(url)
    return f"postgresql://{parts.netloc.rpartition('@')[2]}{unquote(parts.path)}"
