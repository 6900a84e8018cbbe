"""`mlcd import`: takes over vectors that other programs made."""

from pathlib import Path

import click

from mlcd.commands.common_options import ARTIFACT_OUT, LOCAL_PATH, finish, reporter_option
from mlcd.progress import Reporter, count_of


@click.command("import")
@click.argument("vectors", type=LOCAL_PATH)
@click.argument("out", type=ARTIFACT_OUT)
@click.option(
    "--model-name",
    required=True,
    metavar="NAME",
    help="The model that made the vectors. Vectors of different names are not compared.",
)
@click.option(
    "--keys",
    type=LOCAL_PATH,
    help="The keys of the rows: a .txt file with one per line, or a .parquet file with a column"
    " `key`.  [default: those beside the vectors, else the numbers of the rows]",
)
@click.option(
    "--images",
    metavar="IMAGES",
    help="The images, whose keys must be the rows': for classes, thumbnails and pictures.",
)
@click.option(
    "--column", help="The column, tensor or field with the vectors.  [default: the only one]"
)
@reporter_option
def import_(
    vectors: Path,
    out: Path,
    model_name: str,
    keys: Path | None,
    images: str | None,
    column: str | None,
    reporter: Reporter,
) -> None:
    """Turn VECTORS of another program into embeddings at OUT.

    VECTORS: a .npy, .parquet or .safetensors file, a .faiss index that holds its vectors exactly, a
    .lance dataset, or a folder of clip-retrieval or FiftyOne. Rows of norm 1 keep their bits;
    others are normalized. Rows that cannot be used are skipped and listed in OUT/errors.jsonl.
    """
    from mlcd.images.sources import open_source
    from mlcd.pipelines.import_vectors import import_vectors
    from mlcd.pipelines.vector_files import open_vectors, read_keys

    artifact = import_vectors(
        open_vectors(vectors, column=column),
        None if keys is None else read_keys(keys),
        out,
        reporter,
        model_name=model_name,
        images=None if images is None else open_source(images),
    )
    facts = artifact.summary
    finish(
        reporter,
        artifact,
        f"{count_of(facts['images'], 'embedding')} of {facts['dimension']},"
        f" {facts['errors']} skipped",
    )
