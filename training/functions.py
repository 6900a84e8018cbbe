"""`mlcd.train` and `mlcd.evaluate`: the commands of the same names as Python functions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mlcd.artifacts.manifest import Artifact
from mlcd.locations import Location, artifact_path
from mlcd.progress import Reporter


def train(
    recipe: Location, settings: Mapping[str, Any] | None = None, *, progress: bool = False
) -> Artifact:
    """Trains a tower and returns the run. Call it again to resume an interrupted run.

    recipe: a YAML file or the name of a built-in recipe. settings: recipe keys by dotted name, such
    as {"data.images": "photos/", "data.labels": "labels", "out": "run"}. Raises ConfigInvalid for
    an invalid setting, Diverged if the loss or a gradient is not finite.
    """
    from mlcd.training.evaluation.while_training import open_evaluation
    from mlcd.training.pairs.pairs_config import PairsConfig, load_any_config
    from mlcd.training.run.run_pairs import run_pairs
    from mlcd.training.run.run_training import run_training

    overrides = [f"{name}={value}" for name, value in (settings or {}).items()]
    config = load_any_config(str(recipe), overrides)
    reporter = _reporter(shown=progress)
    if isinstance(config, PairsConfig):
        return run_pairs(config, reporter)
    return run_training(config, reporter, open_evaluation=open_evaluation)


def evaluate(
    representation: Location,
    kind: Literal["knn", "clusters", "linear-probe"] = "knn",
    *,
    images: Location | None = None,
    hold_out: float | None = None,
    out: Location | None = None,
    progress: bool = False,
) -> dict[str, float]:
    """Returns the metrics that `mlcd evaluate KIND` prints, by name.

    representation: a run, a checkpoint, a model or an embeddings artifact. images: images to
    encode; None uses a run's training data. hold_out: share of each class to test on; None uses
    0.2. out: path to write the evaluation artifact to. Raises ConfigInvalid if no image has a known
    class, InvalidInput if a run was trained on the test images.
    """
    from mlcd.training.evaluation.report import (
        ClustersProtocol,
        KnnProtocol,
        ProbeProtocol,
        Protocol,
        Subject,
        evaluate_all,
    )

    protocols: dict[str, Protocol] = {
        "knn": KnnProtocol("embedding", "accuracy", hold_out, neighbors=5),
        "clusters": ClustersProtocol("embedding", seed=0),
        "linear-probe": ProbeProtocol("embedding", "accuracy", hold_out),
    }
    (record,) = evaluate_all(
        [Path(representation)],
        protocols[kind],
        Subject(None if images is None else str(images)),
        out=None if out is None else artifact_path(out),
        reporter=_reporter(shown=progress),
    )
    return dict(record["metrics"])


def _reporter(*, shown: bool) -> Reporter:
    return Reporter("auto" if shown else "silent")
