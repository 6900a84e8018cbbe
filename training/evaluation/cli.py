"""The commands `mlcd evaluate`, which measure the quality of a run, a model or embeddings."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import click

from mlcd.commands.common_options import (
    ARTIFACT_OUT,
    LOCAL_PATH,
    WEIGHTS,
    reporter_option,
    unmatched_option,
)
from mlcd.progress import Reporter
from mlcd.training.delayed_exit import delayed_exit
from mlcd.training.evaluation.fine_tuning.cli import evaluate_fine_tune
from mlcd.training.evaluation.patches.cli import evaluate_pca
from mlcd.training.evaluation.robustness.cli import evaluate_robustness
from mlcd.training.evaluation.suite.cli import evaluate_suite
from mlcd.training.evaluation.texts.cli import (
    compare_evaluations,
    evaluate_retrieval,
    evaluate_zero_shot,
)
from mlcd.world import is_first

if TYPE_CHECKING:
    from mlcd.training.evaluation.report import Protocol
    from mlcd.training.evaluation.representations import Features
    from mlcd.training.evaluation.scores import Metric
    from mlcd.training.evaluation.splits import Sides


@click.group()
def evaluate() -> None:
    """Measure representations: checkpoints, runs or embeddings artifacts.

    Several processes share knn, clusters and linear-probe by `torchrun --nproc-per-node N -m mlcd
    evaluate ...`; the results are the same.
    """


for _command in (
    compare_evaluations,
    evaluate_fine_tune,
    evaluate_pca,
    evaluate_retrieval,
    evaluate_robustness,
    evaluate_suite,
    evaluate_zero_shot,
):
    evaluate.add_command(_command)


_Command = Callable[..., None]


def _common_options(command: _Command) -> _Command:
    """Adds the arguments and options that every kind of evaluation takes."""
    decorators: list[Callable[[_Command], _Command]] = [
        click.argument("checkpoints", nargs=-1, metavar="[CHECKPOINT]...", type=WEIGHTS),
        click.option("--images", help="Images to encode; default: the run's training images."),
        click.option(
            "--train",
            help="The known side: images, embeddings, or a .txt file with one key per line.",
        ),
        click.option("--test", help="With --train: the tested side, of the same kind."),
        click.option(
            "--split",
            type=LOCAL_PATH,
            help="A .json of the keys of train, val and test, or of several folds and test.",
        ),
        click.option(
            "--seen",
            "may_be_seen",
            is_flag=True,
            help="Allow test images that the run was trained or clustered on, and count them.",
        ),
        click.option(
            "--features",
            type=click.Choice(["embedding", "pooled"]),
            default="embedding",
            show_default=True,
            help="embedding: as served. pooled: before the projection, not normalized, as in "
            "CLIP's protocol.",
        ),
        unmatched_option,
        click.option("--out", type=ARTIFACT_OUT, help="Also write the results as an artifact."),
        reporter_option,
    ]
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


_hold_out = click.option(
    "--hold-out",
    type=click.FloatRange(0, 1, max_open=True),
    help="Share of each class to test on, by the hash of the key.  [default: 0.2, or the split of "
    "the folders]",
)
_METRICS: Final = ("accuracy", "mean-per-class", "mean-top1-top5", "roc-auc")
_metric = click.option(
    "--metric",
    type=click.Choice(_METRICS),
    default="accuracy",
    show_default=True,
)


@evaluate.command("knn")
@_hold_out
@_metric
@click.option("--neighbors", type=click.IntRange(1), default=5, show_default=True)
@click.option("--leave-one-out", is_flag=True, help="Test every image; all other images vote.")
@_common_options
def evaluate_knn(
    checkpoints: tuple[str, ...],
    features: "Features",
    hold_out: float | None,
    metric: "Metric",
    neighbors: int,
    leave_one_out: bool,
    **common: Any,
) -> None:
    """Classify held-out images by a weighted vote of their neighbors (cosine, T = 0.07)."""
    from mlcd.training.evaluation.report import KnnProtocol

    if leave_one_out:
        if hold_out is not None:
            raise click.UsageError("--leave-one-out tests every image: leave out --hold-out")
        hold_out = 0.0

    _measure(KnnProtocol(features, metric, hold_out, neighbors), checkpoints, **common)


@evaluate.command("clusters")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Seed of the clustering.",
)
@_common_options
def evaluate_clusters(
    checkpoints: tuple[str, ...],
    features: "Features",
    seed: int,
    **common: Any,
) -> None:
    """Compare k-means clusters with the classes of all images.

    There are as many clusters as classes. The results are purity and normalized mutual information.
    """
    from mlcd.training.evaluation.report import ClustersProtocol

    _measure(ClustersProtocol(features, seed), checkpoints, **common)


@evaluate.command("linear-probe")
@_hold_out
@click.option(
    "--metric",
    type=click.Choice([*_METRICS, "map-11"]),
    default="accuracy",
    show_default=True,
    help="map-11: VOC's mean average precision, with --labels.",
)
@click.option(
    "--labels",
    type=LOCAL_PATH,
    help="Of images with several labels each: a .jsonl of path, labels and, optionally, difficult.",
)
@_common_options
def evaluate_linear_probe(
    checkpoints: tuple[str, ...],
    features: "Features",
    hold_out: float | None,
    metric: str,
    labels: Path | None,
    **common: Any,
) -> None:
    """CLIP's linear probe: logistic regression on fixed features.

    C is searched from coarse to fine on validation images, a fifth of the images that are not held
    out. The tested model is fitted again on all images that are not held out. CLIP's protocol uses
    --features pooled.
    """
    from mlcd.training.evaluation.label_tables import read_labels
    from mlcd.training.evaluation.report import LabelsProtocol, ProbeProtocol

    if (labels is None) != (metric != "map-11"):
        raise click.UsageError("--labels and --metric map-11 require each other")
    protocol: Protocol = (
        ProbeProtocol(features, cast("Metric", metric), hold_out)
        if labels is None
        else LabelsProtocol(features, read_labels(labels), hold_out)
    )
    _measure(protocol, checkpoints, **common)


def _measure(
    protocol: "Protocol",
    checkpoints: tuple[str, ...],
    *,
    images: str | None,
    train: str | None,
    test: str | None,
    split: Path | None,
    may_be_seen: bool,
    allow_unmatched: bool,
    out: Path | None,
    reporter: Reporter,
) -> None:
    from mlcd.training.evaluation.report import Subject, evaluate_all, protocol_line, result_line
    from mlcd.training.evaluation.splits import read_split
    from mlcd.training.processes import open_processes

    if not is_first():
        reporter = Reporter("silent")
    with (
        delayed_exit(),
        open_processes() as processes,
        processes.failing_together(),
    ):
        sides = _sides(train, test)
        parts = None if split is None else read_split(split)
        results = evaluate_all(
            _list_paths(checkpoints, sides),
            protocol,
            Subject(images, sides, may_be_seen, parts, allow_unmatched),
            out=out,
            reporter=reporter,
            world=processes.world,
            device=processes.device,
        )
    lines = [result_line(result) for result in results]
    reporter.result(
        {"results": results}, "\n".join([*lines, *dict.fromkeys(map(protocol_line, results))])
    )


def _sides(train: str | None, test: str | None) -> "Sides | None":
    from mlcd.training.evaluation.splits import Sides

    if train is None and test is None:
        return None
    if train is None or test is None:
        raise click.UsageError("--train and --test require each other")
    return Sides.of(train, test)


def _list_paths(checkpoints: tuple[str, ...], sides: "Sides | None") -> list[Path]:
    """Returns the paths to evaluate.

    If --train and --test are embeddings, the test artifact is evaluated.
    """
    if sides is not None and sides.kind == "embeddings":
        if checkpoints:
            raise click.UsageError(
                "--train and --test with embeddings need no model: leave out CHECKPOINT"
            )
        return [Path(sides.test)]
    if not checkpoints:
        raise click.UsageError(
            "give CHECKPOINT (a checkpoint, run or embeddings), or embeddings as --train and --test"
        )
    return [Path(path) for path in checkpoints]
