"""`mlcd curate`: embeddings to a selection of images."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlcd.commands.common_options import LOCAL_PATH, finish, reporter_option
from mlcd.progress import Reporter

if TYPE_CHECKING:
    from mlcd.pipelines.curate import Keep


@click.command()
@click.argument("embeddings", type=LOCAL_PATH)
@click.argument("out", type=LOCAL_PATH)
@click.option(
    "--duplicates",
    type=click.FloatRange(0, 1, min_open=True),
    required=True,
    help="The cosine from which two images are near duplicates.",
)
@click.option(
    "--keep",
    type=click.Choice(["first", "best", "largest"]),
    default="first",
    show_default=True,
    help="Of each group of near duplicates. best: most like all others; largest: by the file.",
)
@reporter_option
def curate(
    embeddings: Path, out: Path, duplicates: float, keep: "Keep", reporter: Reporter
) -> None:
    """Decide at OUT which images of EMBEDDINGS to keep: one of each group of near duplicates.

    OUT/decisions.parquet holds key, keep, reason and group of every image. No file is removed.
    """
    from mlcd.artifacts.embeddings import EmbeddingsArtifact
    from mlcd.pipelines.curate import CurateOptions
    from mlcd.pipelines.curate import curate as run

    options = CurateOptions(duplicates=duplicates, keep=keep)
    artifact = run(EmbeddingsArtifact.open(embeddings), out, options, reporter)
    facts = artifact.summary
    line = f"{facts['kept']} of {facts['images']} images kept, {facts['groups']} groups"
    finish(reporter, artifact, line)
