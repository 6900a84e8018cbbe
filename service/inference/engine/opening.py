"""Opens the towers of a model by its name, including fake models."""

from pathlib import Path

from mlcd.encoders import has_text, open_encoder, open_text_encoder
from mlcd.encoders.encoder import Encoder
from mlcd.encoders.text_encoder import TextEncoder
from mlcd.models.text_part import FOLDER
from mlcd.models.tokenizer import Tokenizer
from mlcd.service.inference.engine.fake import PREFIX, FakeEncoder, FakeTextEncoder, fake_tokenizer
from mlcd.service.inference.served import Opening


def open_images(opening: Opening) -> Encoder:
    """Opens the image tower. Raises the errors of `mlcd.encoders.open_encoder`."""
    if opening.spec.startswith(PREFIX):
        return FakeEncoder(opening.spec)
    return open_encoder(opening.spec, opening.encoder)


def open_texts(opening: Opening) -> TextEncoder:
    """Opens the text tower. Raises the errors of `mlcd.encoders.open_text_encoder`."""
    if opening.spec.startswith(PREFIX):
        return FakeTextEncoder(opening.spec)
    return open_text_encoder(opening.spec, opening.encoder)


def find_tokenizer(spec: str) -> Tokenizer | None:
    """Returns the tokenizer of a model; None if the model embeds only images.

    Raises ArtifactInvalid for a damaged tokenizer.
    """
    if spec.startswith(PREFIX):
        return fake_tokenizer(spec)
    return Tokenizer.open(Path(spec) / FOLDER) if has_text(spec) else None
