"""Opens the collections of a place: a folder, or a store at a URL."""

from pathlib import Path
from typing import Final

from mlcd.collections.port import CollectionsPort
from mlcd.collections.store import Collections
from mlcd.collections.store_urls import is_store, kind_of
from mlcd.collections.thumbnail_store import DEFAULT_MAX_BYTES
from mlcd.errors import ConfigInvalid
from mlcd.extras import install_command


def open_place(
    place: str,
    *,
    read_only: bool = False,
    max_collections: int | None = None,
    max_thumbnail_bytes: int = DEFAULT_MAX_BYTES,
) -> CollectionsPort:
    """Opens all collections of a place: a folder, or a store at a URL.

    Arguments: see `Collections.open`; a store at a URL uses only `max_collections`.
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
    """Opens the collections of a store at a URL.

    background: index when due; False leaves it to `reindex`.
    """
    opener, product = _OPENERS[kind_of(url)]
    try:
        return opener(url, background, max_collections)
    except ModuleNotFoundError as error:
        raise ConfigInvalid(
            f"collections in {product} are not installed",
            remedy=install_command(product.lower()),
        ) from error


def _open_postgres(url: str, background: bool, limit: int | None) -> CollectionsPort:  # noqa: FBT001
    from mlcd.collections.postgres.store import PostgresCollections

    return PostgresCollections.open(url, background=background, max_collections=limit)


def _open_milvus(url: str, background: bool, limit: int | None) -> CollectionsPort:  # noqa: FBT001
    from mlcd.collections.milvus.store import MilvusCollections

    return MilvusCollections.open(url, background=background, max_collections=limit)


_OPENERS: Final = {"postgresql": (_open_postgres, "Postgres"), "milvus": (_open_milvus, "Milvus")}
