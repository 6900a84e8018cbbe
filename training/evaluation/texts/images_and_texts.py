"""A model with both towers, opened as in `mlcd embed`, and its embeddings of images and texts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.manifest import Artifact, open_artifact
from mlcd.cores import available_cores
from mlcd.encoders import open_encoder, open_text_encoder
from mlcd.encoders.options import EncoderOptions
from mlcd.encoders.text_encoder import TextEncoder
from mlcd.errors import InvalidInput, TextRejected
from mlcd.images.entries import Entries
from mlcd.images.quiet import silence_decoders
from mlcd.images.source import Source
from mlcd.pipelines.encoded import encode_entries, no_usable_image
from mlcd.pipelines.resolve import resolve_model
from mlcd.pipelines.text_files import MAX_CHARS
from mlcd.progress import Reporter
from mlcd.text_checks import check_text
from mlcd.training.evaluation.representations import digest_rows
from mlcd.types import Embeddings, SampleKey

# Texts per step of the progress bar; the encoder splits them into batches of similar length.
_CHUNK: Final = 256


@dataclass(frozen=True)
class ImageRows:
    """The embeddings of N images.

    rows: [N, D]. sha256: uint8 [N, 32], of the images. num_unusable: number of further images,
    which could not be decoded.
    """

    rows: Embeddings
    keys: list[SampleKey]
    sha256: NDArray[np.uint8]
    num_unusable: int = 0


class TextImageModel:
    """An opened model with a text tower; the image tower is opened when it is needed."""

    def __init__(self, artifact: Artifact, texts: TextEncoder, options: EncoderOptions) -> None:
        self.artifact, self.texts = artifact, texts
        self._options = options

    def image_rows(self, source: Source, entries: Entries, reporter: Reporter) -> ImageRows:
        """Encodes images of a source. Raises InvalidInput if no image can be decoded."""
        silence_decoders()
        with (
            closing(open_encoder(str(self.artifact.path), self._options)) as encoder,
            reporter.stage("embed", len(entries)) as meter,
        ):
            encoded = encode_entries(
                source,
                entries,
                encoder,
                num_threads=available_cores(),
                on_done=lambda _, errors: meter.advance(1, errors=errors),
            )
        if not encoded.entries:
            raise no_usable_image(source, encoded.errors)
        return ImageRows(
            encoded.embeddings,
            [entry.key for entry in encoded.entries],
            digest_rows(encoded.image_sha256),
            len(encoded.errors),
        )

    def text_rows(self, texts: Sequence[str], reporter: Reporter) -> Embeddings:
        """Encodes texts. Raises InvalidInput naming a text that the model cannot encode."""
        for text in texts:
            if isinstance(rejected := check_text(text, max_chars=MAX_CHARS), TextRejected):
                raise InvalidInput(f"the text {text[:80]!r} cannot be used: {rejected.message}")
        rows = [np.zeros((0, self.texts.dimension), np.float32)]
        with reporter.stage("embed texts", len(texts)) as meter:
            for start in range(0, len(texts), _CHUNK):
                chunk = texts[start : start + _CHUNK]
                rows.append(self.texts.encode(self.texts.tokenizer(list(chunk))))
                meter.advance(len(chunk))
        embeddings = np.concatenate(rows)
        for index in np.flatnonzero(~embeddings.any(axis=1))[:1]:
            raise InvalidInput(
                f"{self.texts.name} has no embedding for the text {texts[index][:80]!r}"
            )
        return embeddings


@contextmanager
def open_model(
    spec: str, options: EncoderOptions, announce: Callable[[str], None]
) -> Iterator[TextImageModel]:
    """Opens a model as `mlcd embed` does. Raises NoTextTower if it lacks a text tower."""
    path = resolve_model(spec, announce)
    with closing(open_text_encoder(path, options)) as texts:
        yield TextImageModel(open_artifact(Path(path), "model", verify_files=False), texts, options)
