"""`mlcd quantize`: a model to one that computes in int8 as well."""

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
    help="Centers whose labels are compared.  [default: those in the model's directory, else the"
    " nearest other image]",
)
@click.option(
    "--num",
    type=click.IntRange(16, 4096),
    default=256,
    show_default=True,
    help="Most images to calibrate on; as many others are measured.",
)
@reporter_option
def quantize(
    model: str, images: str, out: Path, centers: Path | None, num: int, reporter: Reporter
) -> None:
    """Write MODEL with a graph in int8 to OUT, which `--precision int8` takes.

    MODEL: a model artifact, or other weights as `mlcd export` takes them. IMAGES: images like
    those to come, as `mlcd embed` takes them. Nothing is written unless the rows of held-out images
    agree with those in fp32, at a mean cosine of 0.99 or more.
    """
    from mlcd.images.quiet import silence_decoders
    from mlcd.pipelines.quantize import quantize_model

    silence_decoders()
    artifact = quantize_model(
        model, images, out, centers=centers, num=num, announce=announce, reporter=reporter
    )
    facts = artifact.summary
    line = (
        f"model in int8 too, cosine {facts['int8_mean_cosine']:.4f} to fp32 (least"
        f" {facts['int8_min_cosine']:.4f}), {facts['int8_same_label']:.0%} have the same"
        f" {facts['int8_labels'].removeprefix('the ')}, on {facts['int8_held_out_images']} images"
        " held out"
    )
    finish(reporter, artifact, line)
