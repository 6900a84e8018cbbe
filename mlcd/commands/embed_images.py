"""`mlcd embed`: images, or texts, to embeddings."""

from contextlib import closing
from pathlib import Path

import click

from mlcd.commands.common_options import (
    LOCAL_PATH,
    announce,
    encoder_options,
    finish,
    reporter_option,
)
from mlcd.encoders.options import EncoderOptions
from mlcd.progress import Reporter


@click.command()
@click.argument("images", nargs=-1, required=True, metavar="IMAGES")
@click.argument("out", type=LOCAL_PATH)
@click.option(
    "--model",
    required=True,
    help="A model artifact, other weights as `mlcd export` takes them, an .onnx file with its JSON,"
    " hog or pixels.",
)
@encoder_options
@click.option(
    "--append", is_flag=True, help="Add to the embeddings at OUT the images that they do not have."
)
@click.option(
    "--texts",
    is_flag=True,
    help="IMAGES is a file of texts: .txt with one a line, or .jsonl, .csv, .parquet with a column"
    " `text` and, where there are ids, `id`.",
)
@reporter_option
def embed(
    images: tuple[str, ...],
    out: Path,
    model: str,
    encoder: EncoderOptions,
    append: bool,
    texts: bool,
    reporter: Reporter,
) -> None:
    """Turn IMAGES into unit embeddings at OUT.

    IMAGES: a folder, a glob of image files ('photos/*.jpg', in quotes), a .txt file that lists
    some, a glob of tar shards, a parquet or zip file, or an fsspec URL of these. Files that cannot
    be used are skipped and listed in OUT/errors.jsonl. With --texts, a file of texts; the model
    needs a text tower.
    """
    if len(images) > 1:
        raise click.UsageError(
            f"{images[0]} and {images[1]} are two places for images: put a pattern into quotes, or"
            " list files in a .txt"
        )
    if texts:
        if append:
            raise click.UsageError("--append is for images")
        _embed_texts(images[0], out, model, encoder, reporter)
        return
    from mlcd.encoders import open_encoder
    from mlcd.images.quiet import silence_decoders
    from mlcd.images.sources import open_source
    from mlcd.pipelines.embed import embed as run
    from mlcd.pipelines.embed_more import embed_more
    from mlcd.pipelines.resolve import resolve_model

    silence_decoders()
    source = open_source(images[0])
    with closing(open_encoder(resolve_model(model, announce), encoder)) as opened:
        artifact = (embed_more if append and out.exists() else run)(source, opened, out, reporter)
    facts = artifact.summary
    finish(
        reporter,
        artifact,
        f"{facts['images']} embeddings of {facts['dimension']}, {facts['errors']} files skipped",
    )


def _embed_texts(
    texts: str, out: Path, model: str, options: EncoderOptions, reporter: Reporter
) -> None:
    from mlcd.encoders import open_text_encoder
    from mlcd.parts.text_files import read_texts
    from mlcd.pipelines.embed_texts import embed_texts
    from mlcd.pipelines.resolve import resolve_model

    file = read_texts(texts)
    with closing(open_text_encoder(resolve_model(model, announce), options)) as encoder:
        artifact = embed_texts(file, encoder, out, reporter)
    facts = artifact.summary
    line = f"{facts['texts']} embeddings of {facts['dimension']}, {facts['errors']} texts skipped"
    finish(reporter, artifact, line)
