"""The command `mlcd train`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlcd.commands.common_options import (
    FINISHED,
    announce,
    ray_options_with_workers,
    reporter_option,
)
from mlcd.pipelines.ray.session import RayOptions
from mlcd.progress import Reporter
from mlcd.training.delayed_exit import delayed_exit
from mlcd.training.preemption import Interrupted, Preempted, preemptible
from mlcd.world import is_first, torchrun_variable

if TYPE_CHECKING:
    from mlcd.artifacts.manifest import Artifact
    from mlcd.training.config import RunConfig
    from mlcd.training.pairs.pairs_config import PairsConfig

_INTERRUPTED = 130


@click.command()
@click.argument("recipe", required=False)
@click.argument("overrides", nargs=-1, metavar="[a.b=c]...")
@click.option(
    "--resume",
    metavar="RUN",
    help="Resume an interrupted run; of the settings that decide its result only schedule.steps "
    "may change.",
)
@click.option(
    "--replay",
    metavar="BATCH",
    help="With --resume: find where a batch of RUN/bad_batches is not finite; trains nothing.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    help="Number of trainings; from the second on, on clusters of the previous run's embeddings.",
)
@click.option(
    "--clusters",
    type=click.IntRange(2),
    help="With --rounds: number of clusters.  [default: as in data.labels]",
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
    help="With --plan: number of centers.  [default: as in data.labels]",
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    help="With --plan: number of images.  [default: as in data.labels]",
)
@click.option(
    "--peak-tflops",
    type=click.FloatRange(0, min_open=True),
    help="With --plan: peak TFLOP/s of one device.  [default: telemetry.peak_tflops, else measured "
    "here]",
)
@click.option(
    "--mfu",
    type=click.FloatRange(0, 1, min_open=True),
    help="With --plan: share of that peak that training reaches.  [default: 0.4]",
)
@ray_options_with_workers
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
    on: RayOptions | None,
    reporter: Reporter,
) -> None:
    """Train a ViT on images and their labels, or two towers on images and their captions.

    RECIPE is a YAML file or the name of a built-in recipe. a.b=c sets one of its keys, for example
    data.images=DIR data.labels=LABELS out=RUN, or data.pairs=DIR with captions. To train with
    several processes, on one machine or many, use `torchrun --nproc-per-node N -m mlcd train …`.
    An interrupted run can be resumed with any number of processes.

    With --rounds N, `out` contains one directory per round, with features, centers, labels and a
    run. After an interruption, run the same command again to resume.

    With --on ray the processes are workers of a Ray cluster, which must all see the same files. If
    a worker is lost, the remaining workers resume from the last checkpoint.

    Ctrl-C, SIGTERM and SIGUSR1 first save a checkpoint. After SIGTERM or SIGUSR1 the exit status
    is 0.
    """
    plan_options = {
        "num_classes": classes,
        "num_samples": samples,
        "world_size": processes,
        "peak_tflops": peak_tflops,
        "utilization": mfu,
    }
    if on is not None:
        _refuse_on_ray(only_plan, rounds, replay)
    has_rounds = (rounds, clusters, replay) != (None, None, None)
    if _plan_if_asked(
        only_plan, recipe, overrides, resume, plan_options, reporter, has_rounds=has_rounds
    ):
        return
    try:
        # Imported here, because importing torch takes seconds.
        with delayed_exit(), preemptible():
            from mlcd.training.replay import replay as run_replay

            overrides = _check_overrides(recipe, overrides, resume, replay, (rounds, clusters))
            if not is_first():
                reporter = Reporter("silent")
            if resume is not None and replay is not None:
                replayed = run_replay(Path(resume), Path(replay))
                reporter.result(replayed.facts(), str(replayed))
                return
            if rounds is None:
                run = _run(_load_config(recipe, overrides, resume), on, reporter)
            else:
                from mlcd.training.config import load_config
                from mlcd.training.evaluation.while_training import open_evaluation
                from mlcd.training.rounds import run_rounds

                assert recipe is not None
                config = load_config(recipe, overrides)
                *_, run = run_rounds(
                    config, rounds, clusters, reporter, open_evaluation=open_evaluation
                )
    except Preempted as stop:
        where = (
            "outside of the steps" if stop.step is None else f"at step {stop.step}, which is saved"
        )
        reporter.result(
            {"interrupted": True, "step": stop.step},
            f"interrupted {where}: run the same command, or mlcd train --resume, to resume",
        )
        return
    except Interrupted:
        if is_first():
            raise
        raise click.exceptions.Exit(_INTERRUPTED) from None
    if is_first():
        _report(run, reporter)


def _report(run: "Artifact", reporter: Reporter) -> None:
    """Prints the outcome of a training, and suggests the next commands."""
    final = run.summary["final"]
    loss = "unknown" if final["loss"] is None else f"{final['loss']:.4g}"
    line = (
        f"trained {run.summary['samples']} images to loss {loss} at step {final['step']}: "
        f"{run.path}\nnext:"
    )
    line = "\n  ".join([line, *_next_commands(run)])
    reporter.result({FINISHED: str(run.path), "digest": run.digest, **run.summary}, line)


def _next_commands(run: "Artifact") -> list[str]:
    """Returns the commands that evaluate and serve `run`.

    Held-out images of several classes are classified. If the clustering also used these images, as
    in `mlcd explore`, `evaluate knn` requires --seen. Without them, the command draws patches.
    """
    from mlcd.training.evaluation.seen import are_clusters_clean
    from mlcd.training.pairs.pairs_config import PairsConfig, validate_any
    from mlcd.training.run.run_files import read_run_fields

    path, config = str(run.path), validate_any(read_run_fields(run.path))
    if isinstance(config, PairsConfig):
        evaluate = ["retrieval", path, "--test", config.data.pairs, "--seen"]
    elif config.data.hold_out and not config.data.mix and run.summary.get("image_classes", 0) > 1:
        is_clean = are_clusters_clean(run, config.data.hold_out)
        evaluate = ["knn", path] if is_clean else ["knn", path, "--seen"]
    else:
        evaluate = ["pca", path, config.data.sources[0].images, "--out", f"{path}-patches.png"]
    commands = (["evaluate", *evaluate], ["serve", "--model", path])
    return [shlex.join(["mlcd", *command]) for command in commands]


def _check_overrides(
    recipe: str | None,
    overrides: tuple[str, ...],
    resume: str | None,
    replay: str | None,
    rounds: tuple[int | None, int | None],
) -> tuple[str, ...]:
    """Returns the overrides; with --resume even the first argument, RECIPE, is an override."""
    if resume is not None and recipe is not None:
        overrides = (recipe, *overrides)
    elif resume is None and recipe is None:
        raise click.UsageError("give a RECIPE, or --resume RUN")
    num_rounds, num_clusters = rounds
    if num_rounds is not None and resume is not None:
        raise click.UsageError("--rounds resumes by itself: give the recipe again, not --resume")
    if num_clusters is not None and num_rounds is None:
        raise click.UsageError("--clusters requires --rounds")
    if replay is not None and (resume is None or overrides):
        raise click.UsageError("--replay requires --resume RUN and takes no overrides")
    return overrides


def _load_config(
    recipe: str | None, overrides: tuple[str, ...], resume: str | None
) -> "RunConfig | PairsConfig":
    from mlcd.training.pairs.pairs_config import load_any_config
    from mlcd.training.run.resume import resume_config

    if resume is not None:
        return resume_config(Path(resume), overrides)
    assert recipe is not None
    return load_any_config(recipe, overrides)


def _refuse_on_ray(only_plan: bool, rounds: int | None, replay: str | None) -> None:
    if only_plan or rounds is not None or replay is not None:
        raise click.UsageError("--on ray does not support --plan, --rounds or --replay")
    if torchrun_variable("WORLD_SIZE", 1) > 1:
        raise click.UsageError("--on ray starts its own workers: run the command without torchrun")


def _run(
    config: "RunConfig | PairsConfig", on: RayOptions | None, reporter: Reporter
) -> "Artifact":
    from mlcd.training.evaluation.while_training import open_evaluation

    if on is not None:
        from mlcd.training.ray.train_on_ray import train_on_ray

        return train_on_ray(config, on, reporter, announce, open_evaluation=open_evaluation)
    from mlcd.training.pairs.pairs_config import PairsConfig
    from mlcd.training.run.run_pairs import run_pairs
    from mlcd.training.run.run_training import run_training

    if isinstance(config, PairsConfig):
        return run_pairs(config, reporter)
    return run_training(config, reporter, open_evaluation=open_evaluation)


def _plan_if_asked(
    only_plan: bool,
    recipe: str | None,
    overrides: tuple[str, ...],
    resume: str | None,
    options: dict[str, Any],
    reporter: Reporter,
    *,
    has_rounds: bool,
) -> bool:
    """Reports the plan if --plan was given, and returns whether it was."""
    set_options = {name: value for name, value in options.items() if value is not None}
    if not only_plan:
        if set_options:
            raise click.UsageError(
                "--processes, --classes, --samples, --peak-tflops and --mfu require --plan"
            )
        return False
    if recipe is None or resume is not None:
        raise click.UsageError("--plan needs a RECIPE")
    if has_rounds:
        raise click.UsageError(
            "--plan estimates one training: leave out --rounds, --clusters and --replay"
        )
    from mlcd.training.evaluation.while_training import open_evaluation
    from mlcd.training.plan import plan_recipe

    plan = plan_recipe(recipe, overrides, open_evaluation=open_evaluation, **set_options)
    reporter.result(plan.facts(), str(plan))
    return True
