"""`mlcd label`: labels embeddings or images."""

from pathlib import Path
from typing import Literal

import click

from mlcd.commands.common_options import (
    ARTIFACT,
    ARTIFACT_OUT,
    announce,
    encoder_options,
    finish,
    ray_options,
    reporter_option,
    url_options,
)
from mlcd.encoders.options import EncoderOptions
from mlcd.fetching.url_options import UrlOptions
from mlcd.pipelines.ray.session import RayOptions
from mlcd.progress import Reporter


@click.command()
@click.argument("source", metavar="EMBEDDINGS|IMAGES")
@click.argument("out", type=ARTIFACT_OUT)
@click.option("--centers", type=ARTIFACT, help="Centers to label with.")
@click.option(
    "--classes",
    is_flag=True,
    help="Instead of --centers: label each image with the class of its folder.",
)
@click.option(
    "--captions",
    is_flag=True,
    help="Instead of --centers: label each image with the --top rarest tokens of its captions.",
)
@click.option(
    "--top",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Maximum number of labels per row.",
)
@click.option(
    "--threshold",
    type=float,
    help="Keep only those of the --top nearest centers with at least this cosine.",
)
@click.option(
    "--mode",
    type=click.Choice(["exact", "approximate"]),
    default="exact",
    show_default=True,
    help="approximate: compare each row with the centers of a few cells only.",
)
@click.option(
    "--probes",
    type=click.IntRange(1),
    help="With --mode approximate: cells to search.  [default: chosen by an audit]",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="Number of processes that share the work.  [default: 1; with --on, as many as fit]",
)
@ray_options
@click.option(
    "--model",
    help="For IMAGES: the model of the centers; see `mlcd embed --model`.",
)
@encoder_options
@url_options
@click.option(
    "--append",
    is_flag=True,
    help="Add labels of the new rows of EMBEDDINGS, or of the new IMAGES, to the labels at OUT.",
)
@reporter_option
def label(
    source: str,
    out: Path,
    centers: Path | None,
    classes: bool,
    captions: bool,
    top: int,
    threshold: float | None,
    mode: Literal["exact", "approximate"],
    probes: int | None,
    workers: int | None,
    on: RayOptions | None,
    model: str | None,
    encoder: EncoderOptions,
    urls: UrlOptions,
    append: bool,
    reporter: Reporter,
) -> None:
    """Label every row of EMBEDDINGS, or every image of IMAGES, with its nearest centers at OUT.

    Labels are exact by default. --mode approximate is for many thousands of centers; it writes the
    recall on an audited sample to the manifest. Images that cannot be used are skipped and listed
    in OUT/errors.jsonl.
    """
    from mlcd.artifacts.copies import fetch_copy, is_finished
    from mlcd.images.quiet import silence_decoders
    from mlcd.pipelines.label import LabelOptions
    from mlcd.pipelines.label import label as run
    from mlcd.pipelines.label_captions import label_captions
    from mlcd.pipelines.label_classes import label_classes
    from mlcd.pipelines.label_more import label_more
    from mlcd.pipelines.resolve import resolve_model

    silence_decoders()
    if [classes, captions, centers is not None].count(True) != 1:
        raise click.UsageError(
            "give one of --centers CENTERS, --classes (labels by folder) and --captions (tokens)"
        )
    if on is not None and (centers is None or append):
        raise click.UsageError(
            "--append, --classes and --captions cannot be combined with --on ray"
        )
    if centers is None:
        if model is not None or append or threshold is not None or urls.column is not None:
            raise click.UsageError(
                "--model, --append, --threshold and --url-column require --centers"
            )
        artifact = (
            label_captions(source, out, reporter, top=top)
            if captions
            else label_classes(source, out, reporter)
        )
        facts, kind = artifact.summary, "tokens" if captions else "classes"
        finish(
            reporter, artifact, f"labels of {facts['images']} images in {facts['centers']} {kind}"
        )
        return
    if model is None and (encoder != EncoderOptions() or urls.column is not None):
        raise click.UsageError(
            "--precision, --engine, --exif, --decode and --url-column require --model, which is for"
            " images"
        )
    if model is None:
        source = str(fetch_copy(source, reporter))
    model_path = None if model is None else resolve_model(model, announce)
    options = LabelOptions(
        source,
        str(centers),
        top=top,
        threshold=threshold,
        mode=mode,
        probes=probes,
        model=model_path if on is None else model,
        encoder=encoder,
        urls=urls,
    )
    if on is not None:
        from mlcd.pipelines.ray.shards import label_on_ray

        artifact = label_on_ray(options, out, on, reporter, announce=announce)
    elif append and is_finished(out):
        artifact = label_more(options, out, reporter)
    else:
        artifact = run(options, out, workers=workers or 1, reporter=reporter)
    facts = artifact.summary
    finish(
        reporter, artifact, f"labels of {facts['images']} images among {facts['centers']} centers"
    )
