"""`mlcd name`: names centers."""

import hashlib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mlcd.commands.common_options import (
    ARTIFACT,
    FINISHED,
    LOCAL_PATH,
    announce,
    reporter_option,
    unmatched_option,
)
from mlcd.locations import show_location
from mlcd.progress import Reporter

if TYPE_CHECKING:
    from mlcd.models.prompts import TemplateSet
    from mlcd.pipelines.name import Naming
    from mlcd.pipelines.text_files import TextFile

_IMAGENET: Final = "imagenet"  # the words that the package includes


@click.command()
@click.argument("centers", type=ARTIFACT)
@click.option(
    "--set",
    "file",
    type=LOCAL_PATH,
    help='JSON like {"3": "cat"}, or lines of id<TAB>name or id,name; null or an empty name removes'
    " the name.",
)
@click.option(
    "--words",
    type=LOCAL_PATH,
    help="Name by the nearest of these words: .txt with one per line, or a table with a column"
    " `text`; imagenet uses the names of its classes.",
)
@click.option("--model", help="For --words: the model of the centers; it needs a text tower.")
@click.option(
    "--embeddings",
    type=ARTIFACT,
    help="For --words: embeddings of the members.  [default: the embeddings of CENTERS]",
)
@click.option(
    "--templates",
    type=click.Choice(["plain", "simple", "clip"]),
    default="simple",
    show_default=True,
    help="For --words: set of prompt templates for each word; 1, 7 or 80 prompts.",
)
@click.option(
    "--captions",
    type=LOCAL_PATH,
    help="Name by the captions of the members: .jsonl, .csv or .parquet with the columns `id` (the"
    " image's key) and `text`.",
)
@click.option("--labels", type=ARTIFACT, help="For --captions: the labels of the images.")
@unmatched_option
@click.option("--metadata", metavar="FIELD", help="Name by the values of this metadata field.")
@click.option(
    "--collection", type=LOCAL_PATH, help="For --metadata: the collection that has the field."
)
@click.option(
    "--least-share",
    type=click.FloatRange(0, 1),
    default=0.5,
    show_default=True,
    help="Minimum share of the sampled members that a name must fit.",
)
@reporter_option
def name(
    centers: Path,
    file: Path | None,
    words: Path | None,
    model: str | None,
    embeddings: Path | None,
    templates: "TemplateSet",
    captions: Path | None,
    labels: Path | None,
    metadata: str | None,
    collection: Path | None,
    least_share: float,
    allow_unmatched: bool,
    reporter: Reporter,
) -> None:
    """Name CENTERS by hand, or from evidence: by words, captions or metadata of their members.

    Names are stored outside of the manifest, so digests, labels and indexes stay valid. A center
    with weak evidence stays unnamed; CENTERS/names/ contains the reason. Names given by hand stay.
    """
    _check_one_method((file, words, captions, metadata))
    _check_pairs(
        {"--words": words, "--captions": captions, "--metadata": metadata},
        {"--model": model, "--labels": labels, "--collection": collection},
    )
    if words is None and embeddings is not None:
        raise click.UsageError("--embeddings requires --words")
    from mlcd.artifacts.copies import send_beside

    if file is not None:
        from mlcd.pipelines.name import set_names

        naming = set_names(centers, file)
    elif words is not None and model is not None:
        naming = _name_by_words(
            centers,
            words,
            model,
            embeddings=embeddings,
            templates=templates,
            least_share=least_share,
            reporter=reporter,
        )
    elif captions is not None and labels is not None:
        from mlcd.pipelines.name_by_terms import name_by_captions
        from mlcd.pipelines.text_files import read_texts

        naming = name_by_captions(
            centers,
            read_texts(captions),
            labels,
            least_share=least_share,
            may_be_unmatched=allow_unmatched,
        )
    elif metadata is not None and collection is not None:
        from mlcd.pipelines.name_by_terms import name_by_metadata

        naming = name_by_metadata(centers, metadata, collection, least_share=least_share)
    send_beside(centers)
    place = show_location(str(centers))
    line = (
        f"{naming.num_changed} names changed, "
        f"{naming.num_named} of {naming.num_centers} centers named: {place}"
    )
    reporter.result({FINISHED: place, **asdict(naming)}, line)


def _check_one_method(methods: tuple[Path | str | None, ...]) -> None:
    if sum(method is not None for method in methods) != 1:
        raise click.UsageError("give one of --set, --words, --captions and --metadata")


def _check_pairs(methods: Mapping[str, object], partners: Mapping[str, object]) -> None:
    """Raises UsageError if one option of a pair is missing."""
    for (method, value), (partner, partner_value) in zip(
        methods.items(), partners.items(), strict=True
    ):
        if (value is None) != (partner_value is None):
            raise click.UsageError(f"{method} and {partner} require each other")


def _name_by_words(
    centers: Path,
    words: Path,
    model: str,
    *,
    embeddings: Path | None,
    templates: "TemplateSet",
    least_share: float,
    reporter: Reporter,
) -> "Naming":
    from mlcd.encoders import open_text_encoder
    from mlcd.pipelines.name_by_words import name_by_words
    from mlcd.pipelines.resolve import resolve_model

    file = read_words(words)
    with closing(open_text_encoder(resolve_model(model, announce))) as encoder:
        return name_by_words(
            centers,
            file,
            encoder,
            reporter,
            embeddings=embeddings,
            template_set=templates,
            least_share=least_share,
        )


def read_words(words: Path) -> "TextFile":
    """Reads a file of words; `imagenet` means the included words unless a file has that name."""
    from mlcd.pipelines.text_files import TextFile, read_texts

    if words.name != _IMAGENET or words.exists():
        return read_texts(words)
    from mlcd.export.starter.classes import imagenet_words

    texts = imagenet_words()
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    keys = [str(number) for number in range(1, len(texts) + 1)]
    return TextFile(Path(_IMAGENET), keys, list(texts), digest)
