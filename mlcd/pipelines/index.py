"""Indexes embeddings as a collection on disk, exports and imports it, and finds near duplicates."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from mlcd.artifacts.addition import first_part_after
from mlcd.artifacts.disk import raise_if_disk_full, replacing, translate_os_errors
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import Parent
from mlcd.clustering.cells import Take
from mlcd.collections.collection import Collection
from mlcd.collections.duplicates import Group, duplicate_groups
from mlcd.collections.folder import GENERATIONS, LEDGER
from mlcd.collections.item import Item, check_new_id
from mlcd.collections.parquet_items import ParquetItems, write_parquet
from mlcd.collections.picture_copies import copy_groups, thumbnails_of
from mlcd.collections.port import DEFAULT_RECALL, CollectionPort, Description
from mlcd.errors import Conflict, InvalidInput
from mlcd.progress import Reporter, Stages
from mlcd.types import Embeddings

_BLOCK_ROWS = 8192
# name of the second stage; the first adds the items
INDEX_STAGE = "index"


def index(
    embeddings: EmbeddingsArtifact,
    out: Path,
    reporter: Stages,
    *,
    recall: float | None,
    source: Parent | None = None,
    append: bool = False,
) -> Description:
    """Adds all rows to a collection on disk at `out` and indexes it. An item's id is the key; its
    metadata is the `class_name`, if any.

    A repeated call resumes. source: source to record; None for these embeddings. append: to a
    collection of an earlier state of the embeddings, add only the rows gained since. Raises
    Conflict if `out` is another collection and, before writing, InvalidInput for a key that cannot
    be an id.
    """
    for key in embeddings.keys:
        check_new_id(key)
    source = source or embeddings.artifact.as_parent_of(out / GENERATIONS / "0", "embeddings")
    if append and (out / LEDGER).is_file():
        return _index_more(embeddings, out, reporter, recall=recall, source=source)
    with _open_or_create(
        out, embeddings.fingerprint, embeddings.dimension, recall, asdict(source)
    ) as collection:
        blocks = (
            items_of(embeddings, start, block) for start, block in embeddings.blocks(_BLOCK_ROWS)
        )
        return fill(collection, blocks, embeddings.num_rows, reporter)


def _index_more(
    embeddings: EmbeddingsArtifact,
    out: Path,
    reporter: Stages,
    *,
    recall: float | None,
    source: Parent,
) -> Description:
    """Adds new rows only; changes and deletions that users made to earlier items stay."""
    with Collection.open(out, background=False) as collection:
        source_digest = (collection.source or {}).get("digest", "")
        if source_digest == source.digest:
            first_new_part = embeddings.num_parts
        elif (next_part := first_part_after(embeddings.artifact, source_digest)) is not None:
            first_new_part = next_part
        else:
            raise _other_source_error(out)
        collection.check_fingerprint(embeddings.fingerprint)
        if recall not in (None, collection.recall_target):
            raise _other_source_error(out)
        start = embeddings.num_rows_before(first_new_part)
        blocks = (
            items_of(embeddings, block.start, embeddings.read(block))
            for block in embeddings.plan(_BLOCK_ROWS)
            if block.start >= start
        )
        return fill(
            collection,
            blocks,
            embeddings.num_rows - start,
            reporter,
            when_added=lambda: collection.take_source(asdict(source)),
        )


def import_parquet(
    path: Path, out: Path, reporter: Reporter, *, recall: float | None
) -> Description:
    """Adds the items of an exported file to a collection on disk at `out`, which is new or of the
    same model, and indexes it.
    """
    items = ParquetItems.open(path)
    with _open_or_create(out, items.fingerprint, items.dimension, recall, None) as collection:
        return fill(collection, items.blocks(), items.num_items, reporter)


def export_parquet(path: Path, out: Path, reporter: Reporter) -> int:
    """Writes every item of the collection at `path` to one parquet file; returns their number."""
    with (
        Collection.open(path, read_only=True) as collection,
        reporter.stage("export", len(collection)) as meter,
    ):
        return write_parquet(collection, out, meter=meter)


def describe(path: Path) -> Description:
    """Returns the description of the collection at `path`."""
    with Collection.open(path, background=False, read_only=True) as collection:
        return collection.describe()


def duplicates(
    source: Path, out: Path, reporter: Reporter, *, similarity: float | None
) -> tuple[int, int]:
    """Writes groups of near duplicates in embeddings or a collection to `out`, as JSON lines.

    Returns (number of groups, number of items in groups). similarity: minimum cosine of near
    duplicates; None finds copies of the same image by the thumbnails of a collection. Raises
    Conflict if `out` exists.
    """
    if out.exists():
        raise Conflict(f"{out} exists", remedy="give another file")
    if (source / LEDGER).is_file():
        with Collection.open(source, read_only=True) as collection:
            ids, take = collection.rows()
            if similarity is None:
                read = thumbnails_of(collection, ids)
                with reporter.stage("compare", len(ids)) as meter:
                    groups = copy_groups(len(ids), take, read, meter=meter).groups
            else:
                groups = _find_groups(len(ids), take, similarity, reporter)
    elif similarity is None:
        raise InvalidInput(
            f"finding copies needs a collection with thumbnails, got {source}",
            remedy="give the collection of these embeddings, or a minimum cosine",
        )
    else:
        embeddings = EmbeddingsArtifact.open(source)
        groups = _find_groups(embeddings.num_rows, embeddings.unit_rows_at, similarity, reporter)
        ids = embeddings.keys
    with translate_os_errors(out):
        try:
            with replacing(out) as temporary, temporary.open("w", encoding="utf-8") as file:
                for group in groups:
                    file.write(json.dumps(group.record(ids), ensure_ascii=False) + "\n")
        except OSError as error:
            raise_if_disk_full(error, out)
            raise
    return len(groups), sum(len(group.rows) for group in groups)


def _open_or_create(
    out: Path, fingerprint: str, dimension: int, recall: float | None, source: dict[str, str] | None
) -> Collection:
    if not (out / LEDGER).is_file():
        return Collection.create(
            out,
            fingerprint=fingerprint,
            dimension=dimension,
            recall=DEFAULT_RECALL if recall is None else recall,
            source=source,
            background=False,
        )
    collection = Collection.open(out, background=False)
    same_source = source is None or (collection.source or {}).get("digest") == source["digest"]
    if (
        not same_source
        or collection.fingerprint != fingerprint
        or recall not in (None, collection.recall_target)
    ):
        collection.close()
        raise _other_source_error(out)
    return collection


def _other_source_error(out: Path) -> Conflict:
    return Conflict(
        f"{out} is a collection made from other input or settings",
        remedy="remove it or give another output directory; --append adds rows that the embeddings"
        " have gained",
    )


def fill(
    collection: CollectionPort,
    blocks: Iterator[list[Item]],
    num_items: int,
    reporter: Stages,
    *,
    when_added: Callable[[], None] = lambda: None,
) -> Description:
    """Adds the items, calls `when_added`, and indexes the collection if it changed."""
    changed = False
    with reporter.stage("add", num_items) as meter:
        for items in blocks:
            outcomes = collection.add(items)
            changed |= any(outcome != "unchanged" for outcome in outcomes)
            meter.advance(len(items))
    when_added()
    description = collection.describe()
    if changed or description.indexed != description.items:
        with reporter.stage(INDEX_STAGE, description.items) as meter:
            collection.reindex(meter.advance)
    return collection.describe()


def metadata_of(class_name: str | None) -> dict[str, str]:
    """Returns the metadata of an item whose image has this class."""
    return {} if class_name is None else {"class_name": class_name}


def items_of(embeddings: EmbeddingsArtifact, start: int, block: Embeddings) -> list[Item]:
    keys, names = embeddings.keys, embeddings.class_names
    return [
        Item(keys[row], vector, metadata_of(names[row])) for row, vector in enumerate(block, start)
    ]


def _find_groups(num_rows: int, take: Take, similarity: float, reporter: Reporter) -> list[Group]:
    with reporter.stage("compare", num_rows) as meter:
        return duplicate_groups(num_rows, take, similarity, meter=meter)
