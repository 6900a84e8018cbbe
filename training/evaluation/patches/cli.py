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
    help="Pixels; positions are resized to the grid.",
)
@click.option("--most", type=click.IntRange(1), default=8, show_default=True, help="Images.")
@click.option(
    "--foreground",
    is_flag=True,
    help="Color only the positive side of the first component, by components of its own.",
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

    MODEL is a run, a checkpoint, a model artifact with weights, or other weights as `mlcd export`
    takes them. Patches at the border are on the negative side of each component.
    """
    from mlcd.training.evaluation.patches.picture import draw

    drawn = draw(model, images, out, side=side, num=most, foreground=foreground)
    reporter.result(drawn.facts(), str(drawn))
