"""Embeds the texts of a file into an embeddings artifact."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.manifest import Artifact, Request
from mlcd.errors import TextRejected
from mlcd.images.entries import Entry
from mlcd.keys import split_positions
from mlcd.pipelines.embed import write_encoded
from mlcd.pipelines.encoded import (
    PART_ENTRIES,
    EncodedPart,
    errors_name,
    part_sizes,
    part_slice,
    publish_rows,
)
from mlcd.pipelines.ownership import take_over
from mlcd.pipelines.text_files import MAX_CHARS, TextFile
from mlcd.progress import Meter, Reporter
from mlcd.text_checks import check_text
from mlcd.types import SampleKey

if TYPE_CHECKING:  # it imports the package tokenizers, which images do not need
    from mlcd.encoders.text_encoder import TextEncoder

# texts between two updates of the progress bar; the encoder cuts each chunk into batches
_CHUNK: Final = 256


def embed_texts(
    texts: TextFile,
    encoder: "TextEncoder",
    out: Path,
    reporter: Reporter,
    *,
    part_entries: int = PART_ENTRIES,
) -> Artifact:
    """Encodes every text of a file; errors.jsonl lists the texts that cannot be used.

    Work is committed in parts: a rerun after a crash makes only the unfinished parts and gives the
    same bytes. Raises InvalidInput if no text can be used.
    """
    engine = {"precision": encoder.precision, "engine": encoder.engine}
    request = Request(
        "embeddings",
        {**engine, "part_entries": part_entries, "texts": True},
        (texts.parent_of(out),),
        encoder.fingerprint,
    )
    if (finished := find_published(out, request)) is not None:
        return finished
    sizes = part_sizes(len(texts.keys), part_entries)
    splits = split_positions(texts.keys, [None] * len(texts.keys)).tolist()
    split_of = dict(zip(texts.keys, splits, strict=True))
    with Draft(out, request) as draft:
        take_over(draft)
        missing = [part for part in range(len(sizes)) if not draft.has(errors_name(part))]
        done_before = sum(sizes) - sum(sizes[part] for part in missing)
        with reporter.stage("embed", sum(sizes), done=done_before) as meter:
            for part in missing:
                chosen = part_slice(part, part_entries)
                encoded = _encode_part(texts.keys[chosen], texts.texts[chosen], encoder, meter)
                write_encoded(draft, part, encoded, split_of)
        return publish_rows(
            draft,
            len(sizes),
            inputs=f"{len(texts.keys)} texts in {texts.path}",
            unit="texts",
            dimension=encoder.dimension,
            model=encoder.name,
        )


def _encode_part(
    keys: Sequence[SampleKey], texts: Sequence[object], encoder: "TextEncoder", meter: Meter
) -> EncodedPart:
    """Encodes the texts of a part; the rows do not depend on other parts."""
    entries: list[Entry] = []
    digests: list[bytes] = []
    rows = [np.zeros((0, encoder.dimension), np.float32)]
    errors: list[dict[str, str]] = []
    for start in range(0, len(keys), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        chosen = _select_usable(keys[chunk], texts[chunk], errors)
        vectors = encoder.encode(encoder.tokenizer([text for _, text in chosen]))
        for (key, text), row in zip(chosen, vectors, strict=True):
            if row.any():
                data = text.encode()
                entries.append(Entry(key, None, len(data), ()))
                digests.append(hashlib.sha256(data).digest())
                rows.append(row[np.newaxis])
            else:
                detail = f"{encoder.name} maps this text to a row of zeros"
                errors.append(_error(key, TextRejected("no-embedding", detail)))
        meter.advance(len(keys[chunk]), errors=len(errors))
    return EncodedPart(entries, digests, np.concatenate(rows), errors)


def _select_usable(
    keys: Sequence[SampleKey], texts: Sequence[object], errors: list[dict[str, str]]
) -> list[tuple[SampleKey, str]]:
    """Returns (key, text) of each text that a tokenizer accepts; appends errors for the others."""
    usable: list[tuple[SampleKey, str]] = []
    for key, text in zip(keys, texts, strict=True):
        checked = check_text(text, max_chars=MAX_CHARS)
        if isinstance(checked, TextRejected):
            errors.append(_error(key, checked))
        else:
            usable.append((key, checked))
    return usable


def _error(key: SampleKey, rejection: TextRejected) -> dict[str, str]:
    return {"key": key, "reason": rejection.reason, "detail": rejection.message}
