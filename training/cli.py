"""The commands `mlcd train` and `mlcd evaluate`."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import click

from mlcd.artifacts.manifest import published_path
from mlcd.commands.common_options import FINISHED, LOCAL_PATH, reporter_option
from mlcd.progress import Reporter
from mlcd.world import Elsewhere, is_first
from training.evaluation.fine_tuning.cli import evaluate_fine_tune
from training.evaluation.patches.cli import evaluate_pca
from training.evaluation.robustness.cli import evaluate_robustness
from training.evaluation.suite.cli import evaluate_suite
from training.evaluation.texts.cli import (
    compare_evaluations,
    evaluate_retrieval,
    evaluate_zero_shot,
)
from training.preemption import Interrupted, Preempted, preemptible

if TYPE_CHECKING:
    from mlcd.artifacts.manifest import Artifact
    from training.config import RunConfig
    from training.evaluation.image_features import Features
    from training.evaluation.report import Protocol
    from training.evaluation.scores import Metric
    from training.evaluation.sides import Sides
    from training.pairs.pairs_config import PairsConfig

_INTERRUPTED = 130
_FAILED = 2
_LAST_WORD_S = 2.0


@click.command()
@click.argument("recipe", required=False)
@click.argument("overrides", nargs=-1, metavar="[a.b=c]...")
@click.option(
    "--resume",
    metavar="RUN",
    help="Go on with an interrupted run; the settings that decide its result stay.",
)
@click.option(
    "--replay",
    metavar="BATCH",
    help="With --resume: study a batch of RUN/bad_batches; trains nothing.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    help="Train so often; each round but the first on clusters of what the round before learned.",
)
@click.option(
    "--clusters",
    type=click.IntRange(2),
    help="With --rounds: number of clusters.  [default: that of data.labels]",
)
@click.option(
    "--plan",
    "only_plan",
    is_flag=True,
    help="Report memory, arithmetic, time and disk; train nothing.",
)
@click.option(
    "--processes", type=click.IntRange(1), help="With --plan: number of devices.  [default: 1]"
)
@click.option(
    "--classes",
    type=click.IntRange(2),
    help="With --plan: number of centers.  [default: that of data.labels]",
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    help="With --plan: number of images.  [default: that of data.labels]",
)
@click.option(
    "--peak-tflops",
    type=click.FloatRange(0, min_open=True),
    help="With --plan: matrix limit of one device.  [default: telemetry.peak_tflops, else measured "
    "here]",
)
@click.option(
    "--mfu",
    type=click.FloatRange(0, 1, min_open=True),
    help="With --plan: share of that limit that is reached.  [default: 0.4]",
)
@reporter_option
def train(
    recipe: str | None,
    overrides: tuple[str, ...],
    resume: str | None,
    replay: str | None,
    rounds: int | None,
    clusters: int | None,
    only_plan: bool,
    processes: int | None,
    classes: int | None,
    samples: int | None,
    peak_tflops: float | None,
    mfu: float | None,
    reporter: Reporter,
) -> None:
    """Train a ViT on images and their labels, or two towers on images and their captions.

    RECIPE is a YAML file or the name of a built-in recipe. a.b=c sets one of its keys, for example
    data.images=DIR data.labels=LABELS out=RUN, or data.pairs=DIR with captions. Several processes,
    on one machine or many, train together by `torchrun --nproc-per-node N -m mlcd train …`. An
    interrupted run can be resumed with any number of processes.

    With --rounds N, `out` holds the rounds: each has features, centers, labels and a run. The same
    command goes on after an interruption.

    Ctrl-C, SIGTERM and SIGUSR1 save a checkpoint first; after the latter two the exit status is 0.
    """
    plan_options = {
        "num_classes": classes,
        "num_samples": samples,
        "world_size": processes,
        "peak_tflops": peak_tflops,
        "utilization": mfu,
    }
    if _only_plans(only_plan, recipe, overrides, resume, plan_options, reporter):
        return
    try:
        # Importing torch alone takes seconds.
        with preemptible():
            from training.replay import replay as run_replay

            overrides = _overrides(recipe, overrides, resume, replay, (rounds, clusters))
            if not is_first():
                reporter = Reporter("silent")
            if resume is not None and replay is not None:
                found = run_replay(Path(resume), Path(replay))
                reporter.result(found.facts(), str(found))
                return
            if rounds is None:
                run = _trained(_config(recipe, overrides, resume), reporter)
            else:
                from training.config import load_config
                from training.rounds import run_rounds

                assert recipe is not None
                *_, run = run_rounds(load_config(recipe, overrides), rounds, clusters, reporter)
    except Preempted as stop:
        where = (
            "outside of the steps" if stop.step is None else f"at step {stop.step}, which is saved"
        )
        reporter.result(
            {"interrupted": True, "step": stop.step},
            f"interrupted {where}: the same command, or mlcd train --resume, goes on",
        )
        return
    except Interrupted:
        if is_first():
            raise
        raise click.exceptions.Exit(_INTERRUPTED) from None
    except Elsewhere:
        # torchrun stops all processes once one has ended, so the one that reports the error ends
        # first.
        time.sleep(_LAST_WORD_S)
        raise click.exceptions.Exit(_FAILED) from None
    final = run.summary["final"]
    loss = "unknown" if final["loss"] is None else f"{final['loss']:.4g}"
    line = (
        f"trained {run.summary['samples']} images to loss {loss} at step {final['step']}: "
        f"{run.path}"
    )
    reporter.result({FINISHED: str(run.path), "digest": run.digest, **run.summary}, line)


def _overrides(
    recipe: str | None,
    overrides: tuple[str, ...],
    resume: str | None,
    replay: str | None,
    rounds: tuple[int | None, int | None],
) -> tuple[str, ...]:
    """Returns the overrides; with --resume there is no recipe, so every argument is an override."""
    if resume is not None and recipe is not None:
        overrides = (recipe, *overrides)
    elif resume is None and recipe is None:
        raise click.UsageError("give a RECIPE, or --resume RUN")
    number, clusters = rounds
    if number is not None and resume is not None:
        raise click.UsageError("--rounds goes on by itself: give the recipe again, not --resume")
    if clusters is not None and number is None:
        raise click.UsageError("--clusters belongs to --rounds")
    if replay is not None and (resume is None or overrides):
        raise click.UsageError("--replay goes with --resume RUN, and nothing is changed")
    return overrides


def _config(
    recipe: str | None, overrides: tuple[str, ...], resume: str | None
) -> "RunConfig | PairsConfig":
    from training.pairs.pairs_config import change_config, load_any_config
    from training.run import read_run_fields

    if resume is not None:
        run = published_path(Path(resume))
        return change_config(read_run_fields(run), overrides).model_copy(update={"out": str(run)})
    assert recipe is not None
    return load_any_config(recipe, overrides)


def _trained(config: "RunConfig | PairsConfig", reporter: Reporter) -> "Artifact":
    from training.pairs.pairs_config import PairsConfig
    from training.pairs.run_pairs import run_pairs
    from training.run import run_training

    if isinstance(config, PairsConfig):
        return run_pairs(config, reporter)
    return run_training(config, reporter)


def _only_plans(
    only_plan: bool,
    recipe: str | None,
    overrides: tuple[str, ...],
    resume: str | None,
    options: dict[str, Any],
    reporter: Reporter,
) -> bool:
    """Reports the plan if --plan was given, and returns whether it was."""
    given = {name: value for name, value in options.items() if value is not None}
    if not only_plan:
        if given:
            raise click.UsageError(
                "--processes, --classes, --samples, --peak-tflops and --mfu belong to --plan"
            )
        return False
    if recipe is None or resume is not None:
        raise click.UsageError("--plan needs a RECIPE")
    from training.plan import plan_recipe

    plan = plan_recipe(recipe, overrides, **given)
    reporter.result(plan.facts(), str(plan))
    return True


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
        click.argument("checkpoints", nargs=-1, metavar="[CHECKPOINT]..."),
        click.option(
            "--images", help="Images to encode; default: those that the run was trained on."
        ),
        click.option(
            "--train",
            help="The known side: images, embeddings, or a .txt file of keys, one a line.",
        ),
        click.option("--test", help="With --train: the tested side, of the same kind."),
        click.option(
            "--split",
            type=LOCAL_PATH,
            help="A .json of the keys of train, val and test, or of several folds and test.",
        ),
        click.option(
            "--seen",
            is_flag=True,
            help="Count test images that a run has seen, and do not refuse them.",
        ),
        click.option(
            "--features",
            type=click.Choice(["embedding", "pooled"]),
            default="embedding",
            show_default=True,
            help="embedding: as served. pooled: before the projection, not normalized, as CLIP's "
            "protocol.",
        ),
        click.option("--out", type=LOCAL_PATH, help="Also write the results as an artifact."),
        reporter_option,
    ]
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


_hold_out = click.option(
    "--hold-out",
    type=click.FloatRange(0, 1, max_open=True),
    help="Share of each class, by the hash of the key, that is tested on.  [default: 0.2, or what "
    "the folders say]",
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
@click.option("--leave-one-out", is_flag=True, help="Let all others vote for each image.")
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
    from training.evaluation.report import KnnProtocol

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
    from training.evaluation.report import ClustersProtocol

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

    C is searched from coarse to fine on validation images, a fifth of those that are not held out.
    The tested model is fitted again on all images that are not held out. CLIP's protocol takes
    --features pooled.
    """
    from training.evaluation.label_tables import read_labels
    from training.evaluation.report import LabelsProtocol, ProbeProtocol

    if (labels is None) != (metric != "map-11"):
        raise click.UsageError("--labels and --metric map-11 go together")
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
    seen: bool,
    out: Path | None,
    reporter: Reporter,
) -> None:
    from training.evaluation.report import Subject, evaluate_all, protocol_line, result_line
    from training.evaluation.split_files import read_split
    from training.parallel.processes import open_processes

    if not is_first():
        reporter = Reporter("silent")
    try:
        with open_processes() as processes, processes.failing_together():
            sides = _sides(train, test)
            parts = None if split is None else read_split(split)
            results = evaluate_all(
                _represented(checkpoints, sides),
                protocol,
                Subject(images, sides, seen, parts),
                out=out,
                reporter=reporter,
                world=processes.world,
                device=processes.device,
            )
    except Elsewhere:
        # torchrun stops all processes once one has ended, so the one that reports the error ends
        # first.
        time.sleep(_LAST_WORD_S)
        raise click.exceptions.Exit(_FAILED) from None
    lines = [result_line(result) for result in results]
    reporter.result(
        {"results": results}, "\n".join([*lines, *dict.fromkeys(map(protocol_line, results))])
    )


def _sides(train: str | None, test: str | None) -> "Sides | None":
    from training.evaluation.sides import Sides

    if train is None and test is None:
        return None
    if train is None or test is None:
        raise click.UsageError("--train and --test go together")
    return Sides.of(train, test)


def _represented(checkpoints: tuple[str, ...], sides: "Sides | None") -> list[Path]:
    """Returns the paths to evaluate.

    With an embeddings artifact on each side, that is the test artifact itself.
    """
    if sides is not None and sides.kind == "embeddings":
        if checkpoints:
            raise click.UsageError(
                "embeddings on both sides are evaluated themselves: leave out CHECKPOINT"
            )
        return [Path(sides.test)]
    if not checkpoints:
        raise click.UsageError(
            "give a CHECKPOINT, a run or embeddings, or embeddings with --train and --test"
        )
    return [Path(path) for path in checkpoints]
