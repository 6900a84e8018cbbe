"""`mlcd index`: collections, their parquet files and their duplicates."""

from dataclasses import asdict
from pathlib import Path

import click

from mlcd.commands.common_options import FINISHED, LOCAL_PATH, reporter_option
from mlcd.progress import Reporter


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
@reporter_option
def index(
    source: Path,
    out: Path,
    recall: float | None,
    export_: bool,
    duplicates: float | None,
    append: bool,
    reporter: Reporter,
) -> None:
    """Build the collection of SOURCE at OUT (STATE/collections/NAME for the service).

    SOURCE: embeddings or an exported parquet file; with --duplicates embeddings or a collection.
    Interrupted, the same command goes on.
    """
    from mlcd.artifacts.embeddings import EmbeddingsArtifact
    from mlcd.pipelines import index as pipeline

    if export_ and duplicates is not None:
        raise click.UsageError("--export and --duplicates exclude each other")
    if (recall is not None or append) and (export_ or duplicates is not None):
        raise click.UsageError("--recall and --append are for building a collection")
    if export_:
        num_items = pipeline.export_parquet(source, out, reporter)
        reporter.result({FINISHED: str(out), "items": num_items}, f"{num_items} items: {out}")
    elif duplicates is not None:
        groups, items = pipeline.duplicates(source, out, reporter, similarity=duplicates)
        facts = {FINISHED: str(out), "groups": groups, "items": items}
        reporter.result(facts, f"{groups} groups of {items} items: {out}")
    else:
        if source.suffix == ".parquet":
            described = pipeline.import_parquet(source, out, reporter, recall=recall)
        else:
            described = pipeline.index(
                EmbeddingsArtifact.open(source), out, reporter, recall=recall, append=append
            )
        line = f"collection of {described.items} items, {described.kind} index"
        reporter.result({FINISHED: str(out), **asdict(described)}, f"{line}: {out}")
