"""`mlcd demo`: runs all steps, from images to a served model."""

import signal
from pathlib import Path

import click

from mlcd.commands.common_options import LOCAL_PATH, announce


@click.command()
@click.option(
    "--images", help="A folder of your own images.  [default: scikit-learn's scanned digits]"
)
@click.option(
    "--features",
    help="Model whose embeddings are clustered (see `mlcd embed --model`).  [default: hog; with"
    " --images starter, if that extra is installed]",
)
@click.option(
    "--recipe", help="Training recipe.  [default: demo-digits; with --images demo-photos]"
)
@click.option("--out", type=LOCAL_PATH, default=Path("demo"), show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--no-serve", is_flag=True, help="Stop after the result table.")
def demo(
    images: str | None,
    features: str | None,
    recipe: str | None,
    out: Path,
    seed: int,
    host: str,
    port: int,
    no_serve: bool,
) -> None:
    """Run all steps on real images, then serve the trained model."""
    from mlcd.demo import Demo, free_port

    # checked before the work, which takes minutes
    if not no_serve and free_port(host, port) != port:
        announce(f"port {port} is in use: the service will use a free port, and print it")
    # applies between two steps; during a step, the process of the step gets the signal
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    journey = Demo(out=out, images=images, features=features, recipe=recipe, seed=seed)
    journey.run()
    if not no_serve:
        journey.serve(host, port)
