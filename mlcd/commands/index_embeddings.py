"""`mlcd index`: collections, their parquet files and their duplicates."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlcd.collections.store_urls import shown_place
from mlcd.collections.thumbnail_store import DEFAULT_MAX_BYTES
from mlcd.commands.common_options import (
    FINISHED,
    STORE_OR_ARTIFACT,
    STORE_OR_PATH,
    reporter_option,
)
from mlcd.images.thumbnail import DEFAULT_SIDE
from mlcd.locations import local_path
from mlcd.progress import Reporter

if TYPE_CHECKING:  # it brings faiss
    from mlcd.collections.plane import Method


@click.command()
@click.argument("source", type=STORE_OR_ARTIFACT)
@click.argument("out", type=STORE_OR_PATH)
@click.option(
    "--recall",
    type=float,
    help="Recall@10 that the collection's index has to show.  [default: 0.99]",
)
@click.option(
    "--export",
    "export_",
    is_flag=True,
    help="SOURCE: a collection; OUT: a parquet file of all its items.",
)
@click.option(
    "--duplicates", type=float, help="OUT: JSON lines, the groups of SOURCE above this cosine."
)
@click.option(
    "--append", is_flag=True, help="Add to the collection at OUT what the embeddings have gained."
)
@click.option(
    "--thumbnails",
    metavar="IMAGES",
    help="Make the thumbnails that items lack, from the images that were embedded.",
)
@click.option(
    "--thumbnail-side",
    type=click.IntRange(32, 512),
    default=DEFAULT_SIDE,
    show_default=True,
    help="Pixels of a thumbnail's longest side.",
)
@click.option(
    "--thumbnail-bytes",
    type=click.IntRange(min=0),
    default=DEFAULT_MAX_BYTES,
    show_default=True,
    help="Bytes of all thumbnails; the command refuses more.",
)
@click.option(
    "--layout",
    type=click.Choice(["pca", "tsne"]),
    help="The map of the collection: tsne computes one (extra layout), pca removes it.",
)
@reporter_option
def index(
    source: Path | str,
    out: Path | str,
    recall: float | None,
    export_: bool,
    duplicates: float | None,
    append: bool,
    thumbnails: str | None,
    thumbnail_side: int,
    thumbnail_bytes: int,
    layout: "Method | None",
    reporter: Reporter,
) -> None:
    """Build the collection of SOURCE at OUT (STATE/collections/NAME for the service).

    SOURCE: embeddings, an exported parquet file or another collection, to copy; with --duplicates
    embeddings or a collection; with --thumbnails or --layout also the collection OUT itself. A
    collection may also be in Postgres or Milvus: postgresql://HOST/DATABASE/NAME,
    milvus://HOST:PORT[/DATABASE]/NAME. Interrupted, the same command goes on.
    """
    from mlcd.artifacts.embeddings import EmbeddingsArtifact
    from mlcd.images.sources import open_source
    from mlcd.pipelines import index as pipeline
    from mlcd.pipelines.fill_store import is_copy
    from mlcd.pipelines.lay_out import make_layout
    from mlcd.pipelines.make_thumbnails import make_thumbnails

    _check_options(
        builds=recall is not None or append,
        shows=bool(thumbnails or layout),
        export=export_,
        duplicates=duplicates is not None,
    )
    if is_copy(source, out) and not export_ and duplicates is None:
        if append or thumbnails or layout:
            raise click.UsageError("--append, --thumbnails and --layout are for folders")
        _report_copy(str(source), str(out), recall, reporter)
        return
    source, out = local_path(source), local_path(out)  # of a store there is no more to do
    if export_:
        num_items = pipeline.export_parquet(source, out, reporter)
        reporter.result({FINISHED: str(out), "items": num_items}, f"{num_items} items: {out}")
        return
    if duplicates is not None:
        groups, items = pipeline.duplicates(source, out, reporter, similarity=duplicates)
        facts = {FINISHED: str(out), "groups": groups, "items": items}
        reporter.result(facts, f"{groups} groups of {items} items: {out}")
        return
    if source == out and (thumbnails or layout):
        described = pipeline.describe(out)
    elif source.suffix == ".parquet":
        described = pipeline.import_parquet(source, out, reporter, recall=recall)
    else:
        described = pipeline.index(
            EmbeddingsArtifact.open(source), out, reporter, recall=recall, append=append
        )
    line = f"collection of {described.items} items, {described.kind} index"
    facts = {FINISHED: str(out), **asdict(described)}
    if thumbnails is not None:
        made = make_thumbnails(
            out,
            open_source(thumbnails),
            reporter,
            side=thumbnail_side,
            max_bytes=thumbnail_bytes,
        )
        facts["thumbnails"] = asdict(made)
        line += f", {made.stored.items if made.stored else 0} thumbnails"
    if layout is not None:
        make_layout(out, layout, reporter)
        facts["layout"] = layout
        line += f", {layout} layout"
    reporter.result(facts, f"{line}: {out}")


def _check_options(*, builds: bool, shows: bool, export: bool, duplicates: bool) -> None:
    """Raises UsageError for options that exclude each other."""
    if export and duplicates:
        raise click.UsageError("--export and --duplicates exclude each other")
    if builds and (export or duplicates):
        raise click.UsageError("--recall and --append are for building a collection")
    if shows and (export or duplicates):
        raise click.UsageError("--thumbnails and --layout are for a collection")


def _report_copy(source: str, out: str, recall: float | None, reporter: Reporter) -> None:
    from mlcd.pipelines.fill_store import copy_items

    described = copy_items(source, out, reporter, recall=recall)
    place = shown_place(out)
    line = f"collection of {described.items} items, {described.kind} index: {place}"
    reporter.result({FINISHED: place, **asdict(described)}, line)
