"""The places of collections: a folder, or a store behind a URL."""

from pathlib import Path

from mlcd.collections.port import CollectionsPort
from mlcd.collections.store import Collections
from mlcd.collections.store_urls import is_store
from mlcd.collections.thumbnail_store import DEFAULT_MAX_BYTES
from mlcd.errors import ConfigInvalid


def open_place(
    place: str,
    *,
    read_only: bool = False,
    max_collections: int | None = None,
    max_thumbnail_bytes: int = DEFAULT_MAX_BYTES,
) -> CollectionsPort:
    """Opens all collections of a place: a folder, or postgresql://HOST/DATABASE.

    The arguments are those of `Collections.open`; a store behind a URL needs only the third.
    """
    if is_store(place):
        return open_store(place, max_collections=max_collections)
    return Collections.open(
        Path(place),
        read_only=read_only,
        max_collections=max_collections,
        max_thumbnail_bytes=max_thumbnail_bytes,
    )


def open_store(
    url: str, *, background: bool = True, max_collections: int | None = None
) -> CollectionsPort:
    """Opens the collections of a store behind a URL.

    background: indexes are made when they are due; otherwise only by `reindex`.
    """
    try:
        from mlcd.collections.postgres.postgres_store import PostgresCollections
    except ModuleNotFoundError as error:
        raise ConfigInvalid(
            "collections in Postgres are not installed", remedy="pip install 'mlcd[postgres]'"
        ) from error
    return PostgresCollections.open(url, background=background, max_collections=max_collections)
