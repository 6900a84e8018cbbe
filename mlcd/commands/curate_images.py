"""`mlcd curate`: embeddings to a selection of images."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    help="The cosine from which two images are near duplicates.",
)
@click.option(
    "--keep",
    type=click.Choice(["first", "best", "largest"]),
    default="first",
    show_default=True,
    help="Of each group of near duplicates. best: most like all others; largest: by the file.",
)
@click.option(
    "--outliers",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="With --centers: leave out that share, 0.01 for 1 %, of what lies farthest out in its"
    " cluster.",
)
@click.option(
    "--balance",
    type=click.IntRange(1),
    help="With --centers: keep so many, as evenly over the clusters as can be.",
)
@click.option("--centers", type=LOCAL_PATH, help="The clusters of the images.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, help="For --balance.")
@click.option("--dry-run", is_flag=True, help="Tell the counts, and write nothing.")
@reporter_option
def curate(
    embeddings: Path,
    out: Path,
    duplicates: float | None,
    keep: "Keep",
    outliers: float | None,
    balance: int | None,
    centers: Path | None,
    seed: int,
    dry_run: bool,
    reporter: Reporter,
) -> None:
    """Decide at OUT which images of EMBEDDINGS to keep.

    One of each group of near duplicates is kept; then outliers are left out; then a balance is
    drawn. OUT/decisions.parquet holds key, keep, reason and group of every image. No file is
    removed.
    """
    if (duplicates, outliers, balance) == (None, None, None):
        raise click.UsageError("give one or more of --duplicates, --outliers and --balance")
    from mlcd.artifacts.embeddings import EmbeddingsArtifact
    from mlcd.artifacts.manifest import open_artifact
    from mlcd.pipelines.curate import CurateOptions, decide
    from mlcd.pipelines.curate import curate as run

    options = CurateOptions(
        duplicates=duplicates, keep=keep, outliers=outliers, balance=balance, seed=seed
    )
    opened = EmbeddingsArtifact.open(embeddings)
    if dry_run:
        found = None if centers is None else open_artifact(centers, "centers")
        facts = decide(opened, options, reporter, centers=found).facts
        reporter.result(facts, _told(facts))
        return
    artifact = run(opened, out, options, reporter, centers=centers)
    finish(reporter, artifact, _told(artifact.summary))


def _told(facts: dict[str, Any]) -> str:
    groups = f", {facts['groups']} groups" if "groups" in facts else ""
    others = "".join(
        f", {facts[reason]} {name}"
        for reason, name in (("outlier", "outliers"), ("surplus", "beyond the balance"))
        if facts[reason]
    )
    return f"{facts['kept']} of {facts['images']} images kept{groups}{others}"
