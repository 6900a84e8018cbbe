"""`mlcd train` and `mlcd evaluate`."""

from pathlib import Path

import click

from mlcd.cli import FINISHED, reporter_option
from mlcd.progress import Reporter


@click.command()
@click.argument("recipe", required=False)
@click.argument("overrides", nargs=-1, metavar="[a.b=c]...")
@click.option("--resume", metavar="RUN", help="Go on with an interrupted run, with the config it was started with.")
@reporter_option
def train(recipe: str | None, overrides: tuple[str, ...], resume: str | None, reporter: Reporter) -> None:
    """Train a ViT on images and their labels.

    RECIPE is a YAML file or the name of a built-in recipe; a.b=c sets a key of it, for example
    data.images=DIR data.labels=LABELS out=RUN.
    """
    from training.config import load_config
    from training.run import read_run_config, run_training

    if (recipe is None) == (resume is None):
        raise click.UsageError("give a RECIPE, or --resume RUN")
    if resume is not None:
        config = read_run_config(Path(resume)).model_copy(update={"out": resume})
    else:
        assert recipe is not None
        config = load_config(recipe, overrides)
    run = run_training(config, reporter)
    final = run.summary["final"]
    line = f"trained {run.summary['samples']} images to loss {final['loss']:.4g} at step {final['step']}: {run.path}"
    reporter.result({FINISHED: str(run.path), "digest": run.digest, **run.summary}, line)


@click.command()
@click.argument("kind", type=click.Choice(["knn", "clusters"]))
@click.argument("checkpoints", nargs=-1, required=True, metavar="CHECKPOINT...")
@click.option("--images", help="Images to encode; default: those that the run was trained on.")
@click.option("--hold-out", type=click.FloatRange(0, 1, max_open=True), default=0.2, show_default=True)
@click.option("--neighbors", type=click.IntRange(1), default=5, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of the clustering.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the results as an artifact.")
@reporter_option
def evaluate(
    kind: str,
    checkpoints: tuple[str, ...],
    images: str | None,
    hold_out: float,
    neighbors: int,
    seed: int,
    out: Path | None,
    reporter: Reporter,
) -> None:
    """Measure representations: checkpoints, runs or embeddings artifacts.

    knn: accuracy of the weighted vote (cosine, T = 0.07) of held-out images' neighbors among the others.
    clusters: purity and normalized mutual information of k-means with as many clusters as classes.
    """
    from training.evaluation.report import evaluate_all

    settings = {"kind": kind, "hold_out": hold_out, "neighbors": neighbors, "seed": seed}
    results = evaluate_all([Path(path) for path in checkpoints], settings, images=images, out=out, reporter=reporter)
    lines = [
        f"{result['representation']}: " + ", ".join(f"{name} {value:.4g}" for name, value in result["metrics"].items())
        for result in results
    ]
    reporter.result({"results": results}, "\n".join(lines))
