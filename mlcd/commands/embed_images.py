"""`mlcd embed`: embeds images or texts."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlcd.commands.common_options import (
    ARTIFACT,
    ARTIFACT_OUT,
    LOCAL_PATH,
    announce,
    encoder_options,
    finish,
    ray_options_with_workers,
    reporter_option,
    url_options,
)
from mlcd.encoders.options import EncoderOptions
from mlcd.fetching.url_options import UrlOptions
from mlcd.pipelines.ray.session import RayOptions
from mlcd.progress import Reporter, count_of

if TYPE_CHECKING:
    from mlcd.pipelines.fuse_captions import FuseMode, Fusion


@click.command()
@click.argument("images", nargs=-1, required=True, metavar="IMAGES")
@click.argument("out", type=ARTIFACT_OUT)
@click.option(
    "--model",
    required=True,
    help="starter, a model artifact, other weights that `mlcd export` accepts, an .onnx file with"
    " its JSON, an endpoint openai+https://HOST/v1#NAME, hog or pixels.",
)
@encoder_options
@url_options
@click.option("--append", is_flag=True, help="Add the images that the embeddings at OUT lack.")
@click.option(
    "--selection",
    type=ARTIFACT,
    help="Embed only the images that this output of `mlcd curate` keeps.",
)
@click.option(
    "--texts",
    is_flag=True,
    help="IMAGES is a file of texts: .txt with one per line, or .jsonl, .csv, .parquet with a"
    " column `text` and, optionally, `id`.",
)
@click.option(
    "--captions",
    type=LOCAL_PATH,
    help="A file of texts as for --texts, whose ids are the keys of the images. With --fuse.",
)
@click.option(
    "--fuse",
    type=click.Choice(["mean", "concat"]),
    help="Make each row of an image and its caption: their weighted mean, or one behind the other."
    " Such rows are compared with rows fused alike only.",
)
@click.option(
    "--image-weight",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.5,
    show_default=True,
    help="The image's weight in --fuse.",
)
@ray_options_with_workers
@reporter_option
def embed(
    images: tuple[str, ...],
    out: Path,
    model: str,
    encoder: EncoderOptions,
    urls: UrlOptions,
    append: bool,
    selection: Path | None,
    texts: bool,
    captions: Path | None,
    fuse: "FuseMode | None",
    image_weight: float,
    on: RayOptions | None,
    reporter: Reporter,
) -> None:
    """Turn IMAGES into unit embeddings at OUT.

    IMAGES: a folder, a glob of image files ('photos/*.jpg', in quotes), a .txt file with one path
    or URL of an image per line, a glob of tar shards, a parquet or zip file, or an fsspec URL of
    these. Files that cannot be used are skipped and listed in OUT/errors.jsonl. With --texts, a
    file of texts; the model needs a text tower.
    """
    if len(images) > 1:
        raise click.UsageError(
            f"IMAGES must be one argument, got {images[0]} and {images[1]}: put a glob into quotes,"
            " or list the files in a .txt file"
        )
    if append and selection is not None:
        raise click.UsageError("give --append or --selection, not both")
    if on is not None and (append or texts):
        raise click.UsageError("--append and --texts cannot be combined with --on ray")
    if (captions is None) != (fuse is None):
        raise click.UsageError("--captions and --fuse must be given together")
    if fuse is not None and (append or texts or on is not None):
        raise click.UsageError("--fuse cannot be combined with --append, --texts and --on ray")
    if texts:
        if append or selection is not None or urls.column is not None:
            raise click.UsageError(
                "--append, --selection and --url-column cannot be combined with --texts"
            )
        _embed_texts(images[0], out, model, encoder, reporter)
        return
    from mlcd.artifacts.copies import is_finished
    from mlcd.artifacts.selection import Selection
    from mlcd.encoders import open_encoder
    from mlcd.images.quiet import silence_decoders
    from mlcd.images.sources import open_source
    from mlcd.pipelines.embed import embed as run
    from mlcd.pipelines.embed_more import embed_more
    from mlcd.pipelines.resolve import resolve_model

    silence_decoders()
    model_path = resolve_model(model, announce)
    if on is not None:
        from mlcd.pipelines.ray.shards import embed_on_ray

        artifact = embed_on_ray(
            images[0],
            model,
            out,
            on,
            reporter,
            encoder=encoder,
            urls=urls,
            selection=selection,
            announce=announce,
        )
    else:
        source = open_source(images[0], urls=urls)
        opened_selection = None if selection is None else Selection.open(selection)
        with (
            closing(open_encoder(model_path, encoder)) as opened_model,
            _open_fusion(captions, fuse, image_weight, model_path, encoder) as fusion,
        ):
            if append and is_finished(out):
                artifact = embed_more(source, opened_model, out, reporter)
            else:
                artifact = run(
                    source,
                    opened_model,
                    out,
                    reporter,
                    selection=opened_selection,
                    fusion=fusion,
                )
    facts = artifact.summary
    finish(
        reporter,
        artifact,
        f"{count_of(facts['images'], 'embedding')} of {facts['dimension']},"
        f" {count_of(facts['errors'], 'file')} skipped",
    )


@contextmanager
def _open_fusion(
    captions: Path | None,
    mode: "FuseMode | None",
    image_weight: float,
    model: str,
    options: EncoderOptions,
) -> "Iterator[Fusion | None]":
    if captions is None or mode is None:
        yield None
        return
    from mlcd.encoders import open_text_encoder
    from mlcd.pipelines.fuse_captions import Fusion
    from mlcd.pipelines.text_files import read_texts

    with closing(open_text_encoder(model, options)) as encoder:
        yield Fusion(mode, image_weight, read_texts(str(captions)), encoder)


def _embed_texts(
    texts: str, out: Path, model: str, options: EncoderOptions, reporter: Reporter
) -> None:
    from mlcd.encoders import open_text_encoder
    from mlcd.pipelines.embed_texts import embed_texts
    from mlcd.pipelines.resolve import resolve_model
    from mlcd.pipelines.text_files import read_texts

    file = read_texts(texts)
    with closing(open_text_encoder(resolve_model(model, announce), options)) as encoder:
        artifact = embed_texts(file, encoder, out, reporter)
    facts = artifact.summary
    line = f"{count_of(facts['texts'], 'embedding')} of {facts['dimension']},"
    line += f" {count_of(facts['errors'], 'text')} skipped"
    finish(reporter, artifact, line)
