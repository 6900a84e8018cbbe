"""`mlcd quantize`: adds an int8 graph to a model."""

from pathlib import Path

import click

from mlcd.commands.common_options import (
    ARTIFACT,
    ARTIFACT_OUT,
    WEIGHTS,
    announce,
    finish,
    reporter_option,
)
from mlcd.progress import Reporter


@click.command()
@click.argument("model", type=WEIGHTS)
@click.argument("images")
@click.argument("out", type=ARTIFACT_OUT)
@click.option(
    "--centers",
    type=ARTIFACT,
    help="Centers whose labels are compared.  [default: the centers in the model's directory, else"
    " compare the nearest other image]",
)
@click.option(
    "--num",
    type=click.IntRange(16, 4096),
    default=256,
    show_default=True,
    help="Maximum number of images to calibrate on, and of held-out images to measure on.",
)
@reporter_option
def quantize(
    model: str, images: str, out: Path, centers: Path | None, num: int, reporter: Reporter
) -> None:
    """Write MODEL with an int8 graph to OUT, to use with `--precision int8`.

    MODEL: a model artifact, or other weights that `mlcd export` accepts. IMAGES: typical images, in
    any form that `mlcd embed` accepts. Nothing is written unless the int8 embeddings of held-out
    images have a mean cosine of at least 0.99 to fp32.
    """
    from mlcd.images.quiet import silence_decoders
    from mlcd.pipelines.quantize import quantize_model

    silence_decoders()
    artifact = quantize_model(
        model, images, out, centers=centers, num=num, announce=announce, reporter=reporter
    )
    facts = artifact.summary
    line = (
        f"model with int8; on {facts['int8_held_out_images']} held-out images, mean cosine"
        f" {facts['int8_mean_cosine']:.4f} to fp32 (minimum {facts['int8_min_cosine']:.4f}),"
        f" {facts['int8_same_label']:.0%} have the same"
        f" {facts['int8_labels'].removeprefix('the ')}"
    )
    finish(reporter, artifact, line)
