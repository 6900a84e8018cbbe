"""`mlcd index`: builds, copies and exports collections, and finds their duplicates."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from mlcd.collections.store_urls import describe_place
from mlcd.collections.thumbnail_store import DEFAULT_MAX_BYTES
from mlcd.commands.common_options import (
    FINISHED,
    STORE_OR_ARTIFACT,
    STORE_OR_PATH,
    announce,
    reporter_option,
)
from mlcd.errors import MlcdError
from mlcd.images.thumbnail import DEFAULT_SIDE
from mlcd.locations import local_path
from mlcd.progress import Reporter, count_of

if TYPE_CHECKING:  # it imports faiss
    from mlcd.collections.plane import Method
    from mlcd.collections.port import Description


class CosineOrCopies(click.ParamType[float | str]):
    """A cosine, or the word `copies` for copies of the same image."""

    name = "copies|COSINE"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | str:
        if value == "copies":
            return value
        try:
            return float(value)
        except ValueError:
            self.fail(f"must be `copies` or a cosine, got {value}", param, ctx)


@click.command()
@click.argument("source", type=STORE_OR_ARTIFACT)
@click.argument("out", type=STORE_OR_PATH)
@click.option(
    "--recall",
    type=float,
    help="Minimum recall@10 of the collection's index.  [default: 0.99]",
)
@click.option(
    "--export",
    "export_",
    is_flag=True,
    help="Write all items of the collection SOURCE to the parquet file OUT.",
)
@click.option(
    "--duplicates",
    type=CosineOrCopies(),
    metavar="copies|COSINE",
    help="Write groups of near duplicates in SOURCE to OUT, as JSON lines: items of at least this"
    " cosine, or copies of the same image, found by the thumbnails of a collection.",
)
@click.option(
    "--append",
    is_flag=True,
    help="Add rows that the embeddings have gained to the collection at OUT.",
)
@click.option(
    "--images",
    metavar="IMAGES",
    help="Location of the images for thumbnails.  [default: where they were embedded]",
)
@click.option("--no-thumbnails", is_flag=True, help="Skip the thumbnails.")
@click.option(
    "--thumbnail-side",
    type=click.IntRange(32, 512),
    default=DEFAULT_SIDE,
    show_default=True,
    help="Longest side of a thumbnail, in pixels.",
)
@click.option(
    "--thumbnail-bytes",
    type=click.IntRange(min=0),
    default=DEFAULT_MAX_BYTES,
    show_default=True,
    help="Maximum bytes of all thumbnails of a collection in a folder; further items get none.",
)
@click.option(
    "--layout",
    type=click.Choice(["pca", "tsne"]),
    help="Layout of the map: tsne computes one (needs the extra layout), pca removes it.",
)
@reporter_option
def index(
    source: Path | str,
    out: Path | str,
    recall: float | None,
    export_: bool,
    duplicates: float | Literal["copies"] | None,
    append: bool,
    images: str | None,
    no_thumbnails: bool,
    thumbnail_side: int,
    thumbnail_bytes: int,
    layout: "Method | None",
    reporter: Reporter,
) -> None:
    """Build the collection of SOURCE at OUT (STATE/collections/NAME for the service).

    SOURCE: embeddings, an exported parquet file, or another collection to copy; with --duplicates,
    embeddings or a collection; with --images or --layout, also the collection OUT itself. A
    collection may also be in Postgres or Milvus: postgresql://HOST/DATABASE/NAME,
    milvus://HOST:PORT[/DATABASE]/NAME. Items get thumbnails of the images that were embedded. If
    the command is interrupted or thumbnails are missing, run it again: it resumes.
    """
    from mlcd.artifacts.embeddings import EmbeddingsArtifact
    from mlcd.pipelines import index as pipeline
    from mlcd.pipelines.fill_store import copy_items, is_copy
    from mlcd.pipelines.lay_out import make_layout

    if images is not None and no_thumbnails:
        raise click.UsageError("give --images or --no-thumbnails, not both")
    _check_options(
        builds=recall is not None or append,
        shows=bool(images or no_thumbnails or layout),
        export=export_,
        duplicates=duplicates is not None,
    )
    thumbnails = _Thumbnails(images, no_thumbnails, thumbnail_side, thumbnail_bytes)
    if is_copy(source, out) and not export_ and duplicates is None:
        if append or layout:
            raise click.UsageError("--append and --layout require a collection in a folder")
        description = copy_items(
            str(source), str(out), reporter, recall=recall, thumbnails=not no_thumbnails
        )
        thumbnails.finish(source, out, description, reporter)
        return
    source, out = local_path(source), local_path(out)  # a store was handled above
    if export_:
        num_items = pipeline.export_parquet(source, out, reporter)
        reporter.result(
            {FINISHED: str(out), "items": num_items}, f"{count_of(num_items, 'item')}: {out}"
        )
        return
    if duplicates is not None:
        groups, items = pipeline.duplicates(
            source, out, reporter, similarity=None if duplicates == "copies" else duplicates
        )
        facts = {FINISHED: str(out), "groups": groups, "items": items}
        reporter.result(facts, f"{count_of(groups, 'group')} of {count_of(items, 'item')}: {out}")
        return
    if source == out and (images or layout):
        description = pipeline.describe(out)
    elif source.suffix == ".parquet":
        description = pipeline.import_parquet(source, out, reporter, recall=recall)
    else:
        description = pipeline.index(
            EmbeddingsArtifact.open(source), out, reporter, recall=recall, append=append
        )
    if layout is not None:
        make_layout(out, layout, reporter)
    thumbnails.finish(source, out, description, reporter)


@dataclass(frozen=True)
class _Thumbnails:
    """The options about thumbnails."""

    images: str | None
    left_out: bool
    side: int
    max_bytes: int

    def finish(
        self, source: Path | str, out: Path | str, description: "Description", reporter: Reporter
    ) -> None:
        """Makes the missing thumbnails, and reports the collection.

        Missing images are an error only with --images; otherwise a message is printed.
        """
        from mlcd.pipelines.make_thumbnails import make_thumbnails, open_images

        place = describe_place(str(out))
        line = f"collection of {count_of(description.items, 'item')}, {description.kind} index"
        facts = {FINISHED: place, **asdict(description)}
        try:
            source_images = None if self.left_out else open_images(source, self.images)
        except MlcdError as error:
            if self.images is not None:
                raise
            announce(f"no thumbnails were made: {error}")
            source_images = None
        if source_images is not None:
            thumbnails = make_thumbnails(
                str(out), source_images, reporter, side=self.side, max_bytes=self.max_bytes
            )
            facts["thumbnails"] = asdict(thumbnails)
            line += f", {thumbnails.items} thumbnails"
            if thumbnails.full:
                announce(
                    f"the thumbnails reached {self.max_bytes} bytes, so the remaining items have"
                    " none: raise --thumbnail-bytes, and MLCD_THUMBNAILS__MAX_BYTES of the server"
                )
        reporter.result(facts, f"{line}: {place}")


def _check_options(*, builds: bool, shows: bool, export: bool, duplicates: bool) -> None:
    """Raises UsageError for options that exclude each other."""
    if export and duplicates:
        raise click.UsageError("--export and --duplicates exclude each other")
    if builds and (export or duplicates):
        raise click.UsageError(
            "--recall and --append cannot be combined with --export or --duplicates"
        )
    if shows and (export or duplicates):
        raise click.UsageError(
            "--images, --no-thumbnails and --layout cannot be combined with --export or"
            " --duplicates"
        )
