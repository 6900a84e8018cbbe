"""Training in rounds: each round's tower makes the features, clusters and labels of the next.

round-1/run         trained on the labels that the recipe names
round-1/model       the trained tower, exported
round-2/features    embeddings by that model of the images, or of the selected images
round-2/centers     clusters of the features; the head starts from these centers
round-2/labels      labels of the features
round-2/run         the tower trained further; later rounds repeat round 2

Each is an artifact that records its parents, made by the pipeline of the `mlcd` command. Calling
again skips what is finished and resumes what was interrupted, with a bit-identical result.
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
    """Trains `num_rounds` times in sub-directories of `config.out`, and yields each round's run.

    num_clusters: number of clusters from round 2 on; None takes the number of data.labels.
    Raises ConfigInvalid for several data sets, several processes, or num_clusters not above the
    number of labels per image; Conflict if `config.out` is a run.
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
            "rounds require one data set, got data.mix",
            remedy="set data.images and data.labels",
        )
    if num_clusters is not None and num_clusters <= config.loss.num_stored:
        raise ConfigInvalid(
            f"--clusters must be more than the {config.loss.num_stored} labels per image, got"
            f" {num_clusters}",
            remedy="raise --clusters, or lower loss.labels_per_image",
        )
    if torchrun_variable("WORLD_SIZE", 1) > 1:
        raise ConfigInvalid(
            "rounds require one process, but torchrun started several",
            remedy="run the command of each step of the rounds yourself, each under torchrun",
        )
    if (out / MANIFEST).is_file() or draft_path(out).is_dir():
        raise Conflict(
            f"--out must not contain a training run, got {out}", remedy="give another directory"
        )
    out.mkdir(parents=True, exist_ok=True)


def _change_round(
    config: RunConfig,
    *,
    out: str,
    start: str | None = None,
    labels: str | None = None,
    centers: str | None = None,
) -> RunConfig:
    """Returns the configuration of a round; None keeps the recipe's tower and labels."""
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
    """Makes the features, centers and labels of a round with the previous round's tower."""
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
