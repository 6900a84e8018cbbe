"""`mlcd curate`: embeddings to a selection of images."""

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
    """Reads names of issues with commas between them, in the order of all."""
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
    help=f"Leave out images with one of these issues of their pixels: {', '.join(ISSUES)}; or all.",
)
@click.option(
    "--leaks",
    type=click.FloatRange(0, 1, min_open=True),
    help="With --against: the cosine from which an image is a near duplicate of one there.",
)
@click.option("--against", type=ARTIFACT, help="The embeddings of another set, as of a test set.")
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
@click.option(
    "--hierarchical",
    type=click.IntRange(1),
    help="With --centers that have levels: keep so many, evenly over the coarsest clusters, in each"
    " of these evenly over the next finer ones, and so on.",
)
@click.option("--centers", type=ARTIFACT, help="The clusters of the images.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    help="For --balance and --hierarchical.",
)
@click.option(
    "--report", is_flag=True, help="Also write report.html: pictures of what is left out, and why."
)
@click.option("--dry-run", is_flag=True, help="Tell the counts, and write nothing.")
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
    duplicates, then outliers; of what is left a sample is drawn. OUT/decisions.parquet holds key,
    keep, reason and group of every image. No file is removed.
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
