"""`mlcd index`: collections, their parquet files and their duplicates."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlcd.collections.thumbnail_store import DEFAULT_MAX_BYTES
from mlcd.commands.common_options import FINISHED, LOCAL_PATH, reporter_option
from mlcd.images.thumbnail import DEFAULT_SIDE
from mlcd.progress import Reporter

if TYPE_CHECKING:  # it brings faiss
    from mlcd.collections.plane import Method


@click.command()
@click.argument("source", type=LOCAL_PATH)
@click.argument("out", type=LOCAL_PATH)
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
    help="The map of the collection: tsne computes one (extra mlcd[layout]), pca removes it.",
)
@reporter_option
def index(
    source: Path,
    out: Path,
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

    SOURCE: embeddings or an exported parquet file; with --duplicates embeddings or a collection;
    with --thumbnails or --layout also the collection OUT itself. Interrupted, the same command goes
    on.
    """
    from mlcd.artifacts.embeddings import EmbeddingsArtifact
    from mlcd.images.sources import open_source
    from mlcd.pipelines import index as pipeline
    from mlcd.pipelines.lay_out import make_layout
    from mlcd.pipelines.make_thumbnails import make_thumbnails

    if export_ and duplicates is not None:
        raise click.UsageError("--export and --duplicates exclude each other")
    if (recall is not None or append) and (export_ or duplicates is not None):
        raise click.UsageError("--recall and --append are for building a collection")
    if (thumbnails or layout) and (export_ or duplicates is not None):
        raise click.UsageError("--thumbnails and --layout are for a collection")
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
