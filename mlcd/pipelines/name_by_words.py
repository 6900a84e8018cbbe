"""Names centers by the words of a file, embedded by the text tower of the model."""

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from platformdirs import user_cache_path

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.disk import replacing
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.given_names import MAX_NAME, fits_a_name
from mlcd.clustering.nearest import CenterScan
from mlcd.errors import InvalidInput, TextRejected
from mlcd.models.prompts import TemplateSet, class_rows, prompt, templates
from mlcd.naming.chosen_names import LEAST_SHARE
from mlcd.naming.speaking_members import draw_members, nearest_words
from mlcd.naming.term_scores import contrast
from mlcd.naming.terms import MemberTerms
from mlcd.pipelines.name import Members, Naming, name_members, open_centers
from mlcd.pipelines.text_files import TextFile
from mlcd.pipelines.used_embeddings import open_used_embeddings
from mlcd.progress import Stages
from mlcd.text_checks import check_text
from mlcd.types import Embeddings

if TYPE_CHECKING:  # it imports the package tokenizers
    from mlcd.encoders.text_encoder import TextEncoder

_BATCH_WORDS: Final = 64  # between two updates of the progress bar


def name_by_words(
    path: Path,
    words: TextFile,
    encoder: "TextEncoder",
    reporter: Stages,
    *,
    embeddings: Path | None = None,
    template_set: TemplateSet = "simple",
    least_share: float = LEAST_SHARE,
) -> Naming:
    """Names the centers at `path` by the words nearest to their members.

    embeddings: embeddings of the members; by default those that the centers were made from. Raises
    NotFound if they are missing, InvalidInput for another model or fewer than two usable words.
    """
    members = members_by_words(
        path, words, encoder, reporter, embeddings=embeddings, template_set=template_set
    )
    return name_members(path, members, least_share=least_share)


def members_by_words(
    path: Path,
    words: TextFile,
    encoder: "TextEncoder",
    reporter: Stages,
    *,
    embeddings: Path | None = None,
    template_set: TemplateSet = "simple",
) -> Members:
    """Returns a sample of the members, each with its nearest words."""
    artifact, centers = open_centers(path)
    members = open_used_embeddings(artifact, embeddings)
    for fingerprint, subject in (
        (encoder.fingerprint, "the words"),
        (members.fingerprint, "the embeddings"),
    ):
        if fingerprint != centers.fingerprint:
            raise InvalidInput(
                f"{subject} must be of the same model as the centers",
                remedy="give the model that embedded the images",
            )
    vocabulary, rows = _embed_words(words, encoder, template_set, reporter)
    assignment = _assign(members, centers)
    member_rows = draw_members(assignment, len(centers.vectors))
    nearest = nearest_words(_read_rows(members, member_rows), rows)
    facts = {
        "method": "words",
        "words": {"sha256": words.sha256, "used": len(vocabulary)},
        "templates": template_set,
        "model": {
            "name": encoder.name,
            "fingerprint": encoder.fingerprint,
            "engine": encoder.engine,
            "precision": encoder.precision,
        },
        "embeddings": members.artifact.digest,
    }
    terms = MemberTerms.of_ranked(vocabulary, nearest)
    return Members(terms, assignment[member_rows], contrast, facts)


def _select_words(words: TextFile) -> list[str]:
    """Returns the distinct words of a file in its order, without empty lines."""
    unique_words: dict[str, None] = {}
    for key, text in zip(words.keys, words.texts, strict=True):
        word = text.strip() if isinstance(text, str) else text
        if word == "":
            continue
        checked = check_text(word, max_chars=MAX_NAME)
        if isinstance(checked, TextRejected) or not fits_a_name(checked):
            raise InvalidInput(
                f"a name must be printable text of at most {MAX_NAME} characters, got text {key} of"
                f" {words.path}",
                remedy="shorten it, or leave it out",
            )
        unique_words[checked] = None
    return list(unique_words)


def _embed_words(
    words: TextFile, encoder: "TextEncoder", template_set: TemplateSet, reporter: Stages
) -> tuple[list[str], Embeddings]:
    """Returns the words that the model can embed, and their rows, [W, D].

    Raises InvalidInput for fewer than two such words.
    """
    vocabulary = _select_words(words)
    rows = _load_or_embed(vocabulary, encoder, template_set, reporter)
    usable = np.flatnonzero(rows.any(axis=1))
    if len(usable) < 2:
        raise InvalidInput(
            f"{words.path} must contain at least two words that {encoder.name} can embed, got"
            f" {len(usable)}",
            remedy="give more words",
        )
    return [vocabulary[number] for number in usable], rows[usable]


def _load_or_embed(
    vocabulary: list[str],
    encoder: "TextEncoder",
    template_set: TemplateSet,
    reporter: Stages,
) -> Embeddings:
    """Returns the rows of all words, [W, D]; zeros for a word that the model cannot embed.

    The rows are cached in the user's cache folder, by model, templates and words.
    """
    cache_key = [encoder.fingerprint, encoder.engine, encoder.precision, template_set, *vocabulary]
    name = hashlib.sha256("\n".join(cache_key).encode()).hexdigest()[:32]
    path = user_cache_path("mlcd", appauthor=False) / "words" / f"{name}.npy"
    with suppress(OSError, ValueError, EOFError):
        rows: Embeddings = np.load(path, allow_pickle=False)
        if rows.shape == (len(vocabulary), encoder.dimension):
            return rows
    blocks = [np.zeros((0, encoder.dimension), np.float32)]
    with reporter.stage("words", len(vocabulary)) as meter:
        for start in range(0, len(vocabulary), _BATCH_WORDS):
            batch = vocabulary[start : start + _BATCH_WORDS]
            blocks.append(_embed_prompts(batch, encoder, template_set))
            meter.advance(len(batch))
    rows = np.concatenate(blocks)
    with suppress(OSError):  # without a cache, the rows are computed again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.save(file, rows, allow_pickle=False)
    return rows


def _embed_prompts(
    words: list[str], encoder: "TextEncoder", template_set: TemplateSet
) -> Embeddings:
    """Returns the mean row of each word's prompts; zeros if the row of a prompt is zeros."""
    word_templates = templates(template_set)
    prompts = [prompt(template, word) for word in words for template in word_templates]
    rows = encoder.encode(encoder.tokenizer(prompts)).reshape(len(words), len(word_templates), -1)
    word_rows = np.zeros((len(words), rows.shape[2]), np.float32)
    usable = (rows != 0).any(axis=2).all(axis=1)
    if usable.any():
        word_rows[usable] = class_rows(rows[usable])
    return word_rows


def _assign(members: EmbeddingsArtifact, centers: Centers) -> NDArray[np.int32]:
    """Returns the nearest center of each row, [N]."""
    scan = CenterScan(centers.vectors)
    blocks = [
        scan.nearest(centers.align(block), 1).ids[:, 0].astype(np.int32)
        for _, block in members.blocks()
    ]
    return np.concatenate(blocks)


def _read_rows(members: EmbeddingsArtifact, rows: NDArray[np.int64]) -> Embeddings:
    """Returns the rows of these ascending ids, [n, D]; reads one block at a time."""
    blocks = []
    for start, block in members.blocks():
        in_block = rows[slice(*np.searchsorted(rows, [start, start + len(block)]))]
        blocks.append(block[in_block - start])
    return np.concatenate(blocks)
