"""`mlcd clusters`: changes of clusters whose ids stay."""

from pathlib import Path

import click

from mlcd.commands.common_options import ARTIFACT, ARTIFACT_OUT, finish, reporter_option
from mlcd.progress import Reporter

_MEMBERS = click.option(
    "--members",
    type=ARTIFACT,
    help="Embeddings of the clusters' members.  [default: those that CENTERS were made from]",
)
_QUANTILE = click.option(
    "--quantile",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.95,
    show_default=True,
    help="The share of a cluster's members that lie within its bound.",
)
_SEED = click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)


@click.group()
def clusters() -> None:
    """Change clusters whose ids stay: new images arrive, clusters are merged or split.

    Each change makes new CENTERS, whose journal tells all changes since `mlcd cluster`.
    """


@clusters.command()
@click.argument("centers", type=ARTIFACT)
@click.argument("new", type=ARTIFACT)
@click.argument("out", type=ARTIFACT_OUT)
@_MEMBERS
@_QUANTILE
@click.option(
    "--clusters",
    "num_new",
    type=click.IntRange(1),
    help="Number of new clusters.  [default: as many as give them the median size of the old ones]",
)
@_SEED
@reporter_option
def update(
    centers: Path,
    new: Path,
    out: Path,
    members: Path | None,
    quantile: float,
    num_new: int | None,
    seed: int,
    reporter: Reporter,
) -> None:
    """Add clusters to CENTERS for those NEW embeddings that lie beyond the old clusters.

    Old centers and their ids stay as they are.
    """
    from mlcd.pipelines import change_centers

    artifact = change_centers.update(
        centers,
        new,
        out,
        members=members,
        quantile=quantile,
        num_new=num_new,
        seed=seed,
    )
    facts = artifact.summary
    line = (
        f"{facts['new']} new clusters with {facts['in_new']} of {facts['images']} new images,"
        f" {facts['still_beyond']} still beyond any"
    )
    finish(reporter, artifact, line)


@clusters.command()
@click.argument("centers", type=ARTIFACT)
@click.argument("ids", type=click.IntRange(0), nargs=-1, required=True)
@click.argument("out", type=ARTIFACT_OUT)
@reporter_option
def merge(centers: Path, ids: tuple[int, ...], out: Path, reporter: Reporter) -> None:
    """Make the clusters IDS of CENTERS one, that of the lowest id.

    Their centers stay, and clusters.npy tells the cluster of each id.
    """
    from mlcd.pipelines import change_centers

    artifact = change_centers.merge(centers, ids, out)
    finish(reporter, artifact, f"{artifact.summary['clusters']} clusters")


@clusters.command()
@click.argument("centers", type=ARTIFACT)
@click.argument("center", type=click.IntRange(0), metavar="ID")
@click.argument("out", type=ARTIFACT_OUT)
@_MEMBERS
@_QUANTILE
@_SEED
@reporter_option
def split(
    centers: Path,
    center: int,
    out: Path,
    members: Path | None,
    quantile: float,
    seed: int,
    reporter: Reporter,
) -> None:
    """Divide the cluster ID of CENTERS in two: the larger part keeps the id."""
    from mlcd.pipelines import change_centers

    artifact = change_centers.split(
        centers, center, out, members=members, quantile=quantile, seed=seed
    )
    finish(reporter, artifact, f"{artifact.summary['clusters']} clusters")


@clusters.command()
@click.argument("centers", type=ARTIFACT)
@click.argument("target", metavar="OTHER", type=ARTIFACT)
@click.argument("out", type=ARTIFACT_OUT)
@_MEMBERS
@_QUANTILE
@reporter_option
def align(
    centers: Path,
    target: Path,
    out: Path,
    members: Path | None,
    quantile: float,
    reporter: Reporter,
) -> None:
    """Give OTHER centers, clustered from scratch, the ids of CENTERS where they agree.

    Clusters match that share the most members. By default the members are what OTHER was made from.
    """
    from mlcd.pipelines import change_centers

    artifact = change_centers.align(centers, target, out, members=members, quantile=quantile)
    facts = artifact.summary
    line = (
        f"{facts['kept']} clusters keep an id, {facts['new']} are new,"
        f" {100 * facts['stay']:.1f} % of {facts['images']} images stay"
    )
    finish(reporter, artifact, line)


@clusters.command()
@click.argument("labels", type=ARTIFACT)
@click.argument("centers", type=ARTIFACT)
@click.argument("out", type=ARTIFACT_OUT)
@click.option(
    "--embeddings",
    type=ARTIFACT,
    help="Embeddings of the labeled images.  [default: those that LABELS were made from]",
)
@reporter_option
def translate(
    labels: Path, centers: Path, out: Path, embeddings: Path | None, reporter: Reporter
) -> None:
    """Translate LABELS, made with an earlier state of CENTERS, into clusters of today.

    OUT/translated.parquet holds key, before, cluster and now: what the nearest center says today.
    """
    from mlcd.pipelines.translate_labels import translate as run

    artifact = run(labels, centers, out, embeddings=embeddings)
    facts = artifact.summary
    line = (
        f"{facts['images']} labels translated; {100 * facts['disagreement']:.2f} % disagree with"
        " the nearest center"
    )
    finish(reporter, artifact, line)


@clusters.command()
@click.argument("centers", type=ARTIFACT)
@click.argument("origin", type=ARTIFACT)
@click.argument("out", type=ARTIFACT_OUT)
@click.option(
    "--using",
    type=ARTIFACT,
    multiple=True,
    help="Embeddings or centers that the journal's steps used; one option for each.",
)
@reporter_option
def replay(
    centers: Path, origin: Path, out: Path, using: tuple[Path, ...], reporter: Reporter
) -> None:
    """Make CENTERS again at OUT, by their journal, from the ORIGIN that `mlcd cluster` made.

    The digest of every step has to be the one that it had.
    """
    from mlcd.pipelines import change_centers

    artifact = change_centers.replay(centers, origin, using, out)
    finish(reporter, artifact, "every step has the digest that it had")
