"""Training in rounds: the trained tower makes the features, clusters and labels of the next round.

round-1/run         trained on the labels that the recipe names
round-1/model       the trained tower, exported
round-2/features    the same images, or those that the selection keeps, embedded by it
round-2/centers     their clusters, from which the next head starts
round-2/labels      their labels
round-2/run         the tower trained on, and so forth

Each is an artifact with its parents, made by the pipeline of the command of its name. What is
finished is found again, and what was interrupted goes on: the same call ends with the same bytes.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from mlcd.artifacts.copies import fetch_copy
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.labels import LabelTable
from mlcd.artifacts.manifest import MANIFEST, Artifact, draft_path
from mlcd.artifacts.selection import Selection
from mlcd.encoders import open_encoder
from mlcd.errors import ConfigInvalid, Conflict
from mlcd.export.model_artifact import export_model
from mlcd.images.sources import open_source
from mlcd.pipelines.cluster import ClusterOptions, cluster
from mlcd.pipelines.embed import embed
from mlcd.pipelines.label import LabelOptions, label
from mlcd.progress import Reporter
from mlcd.training.config import RunConfig, validate_config
from mlcd.training.run.classification import OpenEvaluation, open_no_evaluation
from mlcd.training.run.run_training import run_training
from mlcd.world import torchrun_variable


def run_rounds(
    config: RunConfig,
    num_rounds: int,
    num_clusters: int | None,
    reporter: Reporter,
    *,
    open_evaluation: OpenEvaluation = open_no_evaluation,
) -> Iterator[Artifact]:
    """Trains `num_rounds` times, below `config.out`, and yields the run of each round.

    num_clusters: of every round but the first; None for as many as the first one's labels have.
    Raises ConfigInvalid if the data are several sets, or there is more than one process, or there
    are more labels than clusters.
    """
    out = Path(config.out)
    _check(config, out, num_clusters)
    images = config.data.sources[0].images
    clusters = (
        num_clusters or LabelTable.open(fetch_copy(config.data.sources[0].labels)).num_centers
    )
    latest: Artifact | None = None
    for number in range(1, num_rounds + 1):
        folder = out / f"round-{number}"
        changes: dict[str, Any] = {"out": str(folder / "run")}
        if latest is not None:
            _relabel(config, images, latest, folder, clusters, reporter)
            changes["start"] = str(latest.path)
            changes["labels"], changes["centers"] = (
                str(folder / name) for name in ("labels", "centers")
            )
        latest = run_training(
            _change_round(config, **changes), reporter, open_evaluation=open_evaluation
        )
        yield latest


def _check(config: RunConfig, out: Path, num_clusters: int | None) -> None:
    if config.data.mix:
        raise ConfigInvalid(
            "rounds need one data set, and data.mix has several",
            remedy="set data.images and data.labels",
        )
    if num_clusters is not None and num_clusters <= config.loss.num_stored:
        raise ConfigInvalid(
            f"{num_clusters} clusters are too few for {config.loss.num_stored} labels an image",
            remedy="ask for more clusters, or lower loss.labels_per_image",
        )
    if torchrun_variable("WORLD_SIZE", 1) > 1:
        raise ConfigInvalid(
            "rounds run in one process",
            remedy="give the commands of the rounds one after the other, each under torchrun",
        )
    if (out / MANIFEST).is_file() or draft_path(out).is_dir():
        raise Conflict(f"{out} is a run", remedy="give another directory for the rounds")
    out.mkdir(parents=True, exist_ok=True)


def _change_round(
    config: RunConfig,
    *,
    out: str,
    start: str | None = None,
    labels: str | None = None,
    centers: str | None = None,
) -> RunConfig:
    """Returns the configuration of a round; the first has the tower and labels of the recipe."""
    fields = config.model_dump(mode="json") | {"out": out}
    if start is not None:
        fields["model"] |= {"start": start, "like": None, "head": None}
        fields["data"] |= {"labels": labels, "centers": centers}
    return validate_config(fields)


def _relabel(
    config: RunConfig,
    images: str,
    run: Artifact,
    folder: Path,
    num_clusters: int,
    reporter: Reporter,
) -> None:
    """Makes the labels of a round by the tower of the round before."""
    model = run.path.parent / "model"
    export_model(str(run.path), model, name="mlcd-vit", images=images, reporter=reporter)
    selection_path = config.data.selection
    selection = None if selection_path is None else Selection.open(fetch_copy(selection_path))
    with closing(open_encoder(str(model))) as encoder:
        embed(open_source(images), encoder, folder / "features", reporter, selection=selection)
    options = ClusterOptions(
        num_clusters=num_clusters, seed=config.seed, hold_out=config.data.hold_out
    )
    embeddings = EmbeddingsArtifact.open(folder / "features")
    cluster(embeddings, folder / "centers", options, reporter=reporter)
    request = LabelOptions(
        str(folder / "features"), str(folder / "centers"), top=config.loss.num_stored
    )
    label(request, folder / "labels", reporter=reporter)
