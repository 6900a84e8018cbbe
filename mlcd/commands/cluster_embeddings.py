"""`mlcd cluster`: clusters embeddings."""

from pathlib import Path

import click

from mlcd.commands.common_options import (
    ARTIFACT,
    ARTIFACT_OUT,
    announce,
    finish,
    ray_options_with_workers,
    reporter_option,
)
from mlcd.keys import HELD_OUT_FRACTION
from mlcd.pipelines.ray.session import RayOptions
from mlcd.progress import Reporter

_FAILED = 1  # exit status of a process whose error another process reports


def read_numbers(_: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...]:
    """Reads whole numbers separated by commas."""
    if text is None:
        return ()
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise click.BadParameter(
            "give whole numbers separated by commas, such as 1000,100", param=option
        ) from error


@click.command()
@click.argument("embeddings", type=ARTIFACT)
@click.argument("out", type=ARTIFACT_OUT)
@click.option("--clusters", type=click.IntRange(1), help="Number of clusters.")
@click.option(
    "--levels",
    metavar="K,K,…",
    callback=read_numbers,
    help="Instead of --clusters: numbers of clusters of several levels, finest first; each level"
    " groups the clusters of the level before.",
)
@click.option(
    "--choose-k",
    "choices",
    metavar="K,K,…",
    callback=read_numbers,
    help="Instead of --clusters: use the one of these numbers that separates held-out rows best.",
)
@click.option(
    "--balanced",
    is_flag=True,
    help="Limit each cluster to a quarter more rows than the mean; members.parquet contains the"
    " cluster of each row.",
)
@click.option(
    "--largest",
    type=click.IntRange(1),
    help="With --balanced: maximum number of rows in a cluster.",
)
@click.option(
    "--iterations",
    type=click.IntRange(0),
    help="Maximum number of iterations.  [default: 25; 3 above 16,384 clusters]",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@click.option(
    "--hold-out",
    type=click.FloatRange(0, 1, max_open=True),
    default=HELD_OUT_FRACTION,
    show_default=True,
    help="Share of each class (or of all images) to leave out, by the hash of the key; training and"
    " evaluation leave out the same images.",
)
@click.option(
    "--sample",
    type=click.IntRange(1),
    help="Cluster a sample of this many rows per cluster, drawn by hash.",
)
@click.option(
    "--subtract-mean", is_flag=True, help="Compare embeddings after subtracting their mean."
)
@click.option(
    "--names", is_flag=True, help="Name each center by the majority of its members' sub-folders."
)
@click.option(
    "--report",
    is_flag=True,
    help="Also write the quality of the clusters to report.json and sizes.png.",
)
@click.option(
    "--examples",
    type=click.IntRange(0, 64),
    default=8,
    show_default=True,
    help="Number of nearest members of each center whose keys are stored.",
)
@click.option(
    "--plan",
    "only_plan",
    is_flag=True,
    help="Print the expected memory, operations and time, and write nothing.",
)
@ray_options_with_workers
@reporter_option
def cluster(
    embeddings: Path,
    out: Path,
    clusters: int | None,
    levels: tuple[int, ...],
    choices: tuple[int, ...],
    balanced: bool,
    largest: int | None,
    iterations: int | None,
    seed: int,
    hold_out: float,
    sample: int | None,
    subtract_mean: bool,
    names: bool,
    report: bool,
    examples: int,
    only_plan: bool,
    on: RayOptions | None,
    reporter: Reporter,
) -> None:
    """Cluster EMBEDDINGS by spherical k-means into centers at OUT.

    If the command is interrupted, run it again: it resumes after the last finished iteration. To
    use several processes, run `torchrun --nproc-per-node N -m mlcd cluster …`; the centers do not
    depend on their number.
    """
    if sum(map(bool, (clusters, levels, choices))) != 1:
        raise click.UsageError("give one of --clusters, --levels and --choose-k")
    if on is not None and only_plan:
        raise click.UsageError("--plan cannot be combined with --on ray")
    if largest and not balanced:
        raise click.UsageError("--largest requires --balanced")
    from mlcd.artifacts.embeddings import EmbeddingsArtifact
    from mlcd.pipelines.cluster import ClusterOptions, choose_number, plan
    from mlcd.pipelines.cluster import cluster as run
    from mlcd.world import ReportedElsewhere, one_voice, open_world

    options = ClusterOptions(
        num_clusters=clusters or (levels or choices)[0],
        iterations=iterations,
        seed=seed,
        hold_out=hold_out,
        sample=sample,
        subtract_mean=subtract_mean,
        names=names,
        report=report,
        examples=examples,
        levels=levels[1:],
        balanced=balanced,
        largest=largest,
    )
    try:
        with open_world() as world, one_voice(world):
            opened = EmbeddingsArtifact.open(embeddings)
            if on is not None and world.size > 1:
                raise click.UsageError(
                    "--on ray starts its own workers: run the command without torchrun"
                )
            if world.rank:
                reporter = Reporter("silent")
            if choices:
                options = choose_number(opened, options, choices)
            if only_plan:
                estimate = plan(opened, out, options, world=world)
                reporter.result(estimate.facts(), str(estimate))
                return
            if on is not None:
                from mlcd.pipelines.ray.clusters import cluster_on_ray

                artifact = cluster_on_ray(opened, out, options, on, reporter, announce=announce)
            else:
                artifact = run(opened, out, options, reporter=reporter, world=world)
    except ReportedElsewhere:
        raise click.exceptions.Exit(_FAILED) from None
    facts = artifact.summary
    bounded = (
        f", {facts['objective_unbounded']:.4f} without the limit of {facts['bound']} rows per"
        " cluster"
        if "bound" in facts
        else ""
    )
    finish(
        reporter,
        artifact,
        f"{facts['clusters']} centers of {facts['rows']} rows ({facts.get('held_out', 0)} held"
        f" out), objective {facts['objective']:.4f}{bounded}",
    )
