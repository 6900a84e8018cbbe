"""`mlcd clusters`: changes clusters and keeps their ids."""

from pathlib import Path

import click

from mlcd.commands.common_options import ARTIFACT, ARTIFACT_OUT, finish, reporter_option
from mlcd.progress import Reporter

_MEMBERS = click.option(
    "--members",
    type=ARTIFACT,
    help="Embeddings of the clusters' members.  [default: the embeddings of CENTERS]",
)
_QUANTILE = click.option(
    "--quantile",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.95,
    show_default=True,
    help="Share of a cluster's members that lie within its bound.",
)
_SEED = click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)


@click.group()
def clusters() -> None:
    """Change clusters and keep their ids: add, merge, split or align clusters.

    Each change writes new CENTERS, whose journal lists all changes since `mlcd cluster`.
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
    help="Number of new clusters.  [default: so that they have the median size of old clusters]",
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
    """Add clusters to CENTERS for the NEW embeddings that lie beyond the old clusters.

    Old centers and their ids do not change.
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
        f" {facts['still_beyond']} still beyond all clusters"
    )
    finish(reporter, artifact, line)


@clusters.command()
@click.argument("centers", type=ARTIFACT)
@click.argument("ids", type=click.IntRange(0), nargs=-1, required=True)
@click.argument("out", type=ARTIFACT_OUT)
@reporter_option
def merge(centers: Path, ids: tuple[int, ...], out: Path, reporter: Reporter) -> None:
    """Merge the clusters IDS of CENTERS into the cluster of the lowest id.

    All centers stay; clusters.npy contains the cluster of each center.
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
    """Split the cluster ID of CENTERS in two: the larger part keeps the id."""
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
    """Give OTHER centers, clustered from scratch, the ids of matching clusters of CENTERS.

    Two clusters match if they share more than half of the members of either. By default, the
    members are the embeddings that OTHER was made from.
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
    help="Embeddings of the labeled images.  [default: the embeddings of LABELS]",
)
@reporter_option
def translate(
    labels: Path, centers: Path, out: Path, embeddings: Path | None, reporter: Reporter
) -> None:
    """Translate LABELS, made with an earlier state of CENTERS, to their current clusters.

    OUT/translated.parquet has the columns key, before (label), cluster (of that label), and now
    (cluster of the nearest center).
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
    help="Embeddings or centers that the steps of the journal used; repeat the option for each.",
)
@reporter_option
def replay(
    centers: Path, origin: Path, out: Path, using: tuple[Path, ...], reporter: Reporter
) -> None:
    """Rebuild CENTERS at OUT by replaying their journal on ORIGIN, made by `mlcd cluster`.

    Fails if the digest of a step differs from the digest in the journal.
    """
    from mlcd.pipelines import change_centers

    artifact = change_centers.replay(centers, origin, using, out)
    finish(reporter, artifact, "every step has the digest of the journal")
