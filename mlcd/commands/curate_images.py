"""`mlcd curate`: selects images by their embeddings."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlcd.commands.common_options import (
    ARTIFACT,
    ARTIFACT_OUT,
    finish,
    reporter_option,
)
from mlcd.progress import Reporter, count_of
from mlcd.types import ISSUES, Issue

if TYPE_CHECKING:
    from mlcd.pipelines.curation.decisions import Keep


def read_issues(_: click.Context, option: click.Parameter, text: str | None) -> tuple[Issue, ...]:
    """Reads names of issues separated by commas; returns them in the order of `ISSUES`."""
    names = [] if text is None else ISSUES if text == "all" else text.split(",")
    for name in names:
        if name not in ISSUES:
            raise click.BadParameter(
                f"an issue must be one of {', '.join(ISSUES)}, got {name}", param=option
            )
    return tuple(name for name in ISSUES if name in names)


@click.command()
@click.argument("embeddings", type=ARTIFACT)
@click.argument("out", type=ARTIFACT_OUT)
@click.option(
    "--issues",
    metavar="NAME,NAME,…",
    callback=read_issues,
    help=f"Leave out images with one of these issues: {', '.join(ISSUES)}; or `all`.",
)
@click.option(
    "--leaks",
    type=click.FloatRange(0, 1, min_open=True),
    help="With --against: leave out images with at least this cosine to an image of that set.",
)
@click.option("--against", type=ARTIFACT, help="Embeddings of another set, such as a test set.")
@click.option(
    "--duplicates",
    type=click.FloatRange(0, 1, min_open=True),
    help="Minimum cosine of near duplicates.",
)
@click.option(
    "--keep",
    type=click.Choice(["first", "best", "largest"]),
    default="first",
    show_default=True,
    help="Image to keep of a group of near duplicates. best: most similar to the others; largest:"
    " largest file.",
)
@click.option(
    "--outliers",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="With --centers: leave out this share of each cluster, the members farthest from its"
    " center; 0.01 is 1 %.",
)
@click.option(
    "--balance",
    type=click.IntRange(1),
    help="With --centers: number of images to keep, as evenly over the clusters as possible.",
)
@click.option(
    "--hierarchical",
    type=click.IntRange(1),
    help="With --centers that have levels: number of images to keep, evenly over the coarsest"
    " clusters, within each of these evenly over the next finer clusters, and so on.",
)
@click.option("--centers", type=ARTIFACT, help="The clusters of the images.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    help="Seed of --balance and --hierarchical.",
)
@click.option(
    "--report", is_flag=True, help="Also write report.html: examples of images left out, and why."
)
@click.option("--dry-run", is_flag=True, help="Print the counts, and write nothing.")
@reporter_option
def curate(
    embeddings: Path,
    out: Path,
    issues: tuple[Issue, ...],
    leaks: float | None,
    against: Path | None,
    duplicates: float | None,
    keep: "Keep",
    outliers: float | None,
    balance: int | None,
    hierarchical: int | None,
    centers: Path | None,
    seed: int,
    report: bool,
    dry_run: bool,
    reporter: Reporter,
) -> None:
    """Decide at OUT which images of EMBEDDINGS to keep.

    Images with issues are left out first, then leaks, then all but one of each group of near
    duplicates, then outliers; a sample is drawn from the remaining images. OUT/decisions.parquet
    contains key, keep, reason and group of every image. No image file is removed.
    """
    from mlcd.pipelines.curate import CurateInputs, decide
    from mlcd.pipelines.curate import curate as run
    from mlcd.pipelines.curation.decisions import CurateOptions

    options = CurateOptions(
        issues=issues,
        leaks=leaks,
        duplicates=duplicates,
        keep=keep,
        outliers=outliers,
        balance=balance,
        hierarchical=hierarchical,
        seed=seed,
        report=report,
    )
    if options.identity().keys() <= {"report"}:
        raise click.UsageError(
            "give one or more of --issues, --leaks, --duplicates, --outliers, --balance and"
            " --hierarchical"
        )
    inputs = CurateInputs.open(embeddings, centers=centers, against=against)
    if dry_run:
        facts = decide(inputs, options, reporter).facts()
        reporter.result(facts, _summarize(facts))
        return
    artifact = run(inputs, out, options, reporter)
    finish(reporter, artifact, _summarize(artifact.summary))


def _summarize(facts: dict[str, Any]) -> str:
    groups = f", {count_of(facts['groups'], 'group')}" if facts["groups"] else ""
    counts = {name: num for name, num in facts.items() if name not in ("images", "kept", "groups")}
    reasons = "".join(f", {num} {name}" for name, num in sorted(counts.items()) if num)
    return f"{facts['kept']} of {facts['images']} images kept{groups}{reasons}"
