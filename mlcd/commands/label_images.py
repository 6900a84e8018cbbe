"""`mlcd label`: embeddings or images to labels."""

from pathlib import Path
from typing import Literal

import click

from mlcd.commands.common_options import (
    LOCAL_PATH,
    LocalPath,
    announce,
    encoder_options,
    finish,
    reporter_option,
)
from mlcd.encoders.options import EncoderOptions
from mlcd.progress import Reporter


@click.command()
@click.argument("source", metavar="EMBEDDINGS|IMAGES")
@click.argument("out", type=LOCAL_PATH)
@click.option("--centers", type=LocalPath())
@click.option(
    "--classes",
    is_flag=True,
    help="In place of --centers: one label each, the class of its folder.",
)
@click.option("--top", type=click.IntRange(1), default=8, show_default=True)
@click.option(
    "--threshold", type=float, help="Keep only centers at least this similar, of the --top nearest."
)
@click.option(
    "--mode", type=click.Choice(["exact", "approximate"]), default="exact", show_default=True
)
@click.option(
    "--probes",
    type=click.IntRange(1),
    help="Of --mode approximate; default: what an audit asks for.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Processes that share the work.",
)
@click.option(
    "--model",
    help="For IMAGES: what embeds them, as in `mlcd embed`; it must be that of the centers.",
)
@encoder_options
@click.option(
    "--append",
    is_flag=True,
    help="Add to the labels at OUT those of rows that EMBEDDINGS have gained.",
)
@reporter_option
def label(
    source: str,
    out: Path,
    centers: str | None,
    classes: bool,
    top: int,
    threshold: float | None,
    mode: Literal["exact", "approximate"],
    probes: int | None,
    workers: int,
    model: str | None,
    encoder: EncoderOptions,
    append: bool,
    reporter: Reporter,
) -> None:
    """Give every row of EMBEDDINGS, or every one of IMAGES, its nearest centers at OUT.

    Exactly, unless --mode approximate: that is for many thousands of centers, and tells the recall
    of an audited sample in the manifest. Images that cannot be used are skipped and listed in
    OUT/errors.jsonl.
    """
    from mlcd.images.quiet import silence_decoders
    from mlcd.pipelines.label import LabelOptions
    from mlcd.pipelines.label import label as run
    from mlcd.pipelines.label_classes import label_classes
    from mlcd.pipelines.label_more import label_more
    from mlcd.pipelines.resolve import resolve_model

    silence_decoders()
    if classes == (centers is not None):
        raise click.UsageError("give --centers CENTERS, or --classes for labels by folder")
    if centers is None:
        if model is not None or append or threshold is not None:
            raise click.UsageError("--classes looks at no pixel and takes no other option")
        artifact = label_classes(source, out, reporter)
        facts = artifact.summary
        line = f"labels of {facts['images']} images in {facts['centers']} classes"
        finish(reporter, artifact, line)
        return
    if model is None and encoder != EncoderOptions():
        raise click.UsageError(
            "--precision, --engine, --exif and --decode are for a --model, which only images need"
        )
    options = LabelOptions(
        source,
        centers,
        top=top,
        threshold=threshold,
        mode=mode,
        probes=probes,
        model=None if model is None else resolve_model(model, announce),
        encoder=encoder,
    )
    if append and out.exists():
        artifact = label_more(options, out, reporter)
    else:
        artifact = run(options, out, workers=workers, reporter=reporter)
    facts = artifact.summary
    finish(
        reporter, artifact, f"labels of {facts['images']} images among {facts['centers']} centers"
    )
