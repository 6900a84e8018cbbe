"""The command `mlcd evaluate pca`."""

from pathlib import Path

import click

from mlcd.commands.common_options import LOCAL_PATH, reporter_option
from mlcd.progress import Reporter


@click.command("pca")
@click.argument("model")
@click.argument("images")
@click.option("--out", type=LOCAL_PATH, required=True, help="The picture: .png, .webp or .jpg.")
@click.option(
    "--side",
    type=click.IntRange(1),
    default=448,
    show_default=True,
    help="Side in pixels; the model's positions are resized to the grid.",
)
@click.option("--most", type=click.IntRange(1), default=8, show_default=True, help="Images.")
@click.option(
    "--foreground",
    is_flag=True,
    help="Color only patches on the positive side of the first component, by their own components.",
)
@reporter_option
def evaluate_pca(
    model: str,
    images: str,
    out: Path,
    side: int,
    most: int,
    *,
    foreground: bool,
    reporter: Reporter,
) -> None:
    """Draw the patches of images in the colors of their three principal components.

    MODEL is a run, a checkpoint, a model artifact with weights, or other weights that `mlcd export`
    accepts. The sign of each component is chosen so that patches at the border are negative.
    """
    from mlcd.training.evaluation.patches.picture import draw

    drawn = draw(model, images, out, side=side, num=most, foreground=foreground)
    reporter.result(drawn.facts(), str(drawn))
