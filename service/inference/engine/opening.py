"""Opens the towers of a model by its name, including fake models."""

from pathlib import Path

from mlcd.encoders import has_text, open_encoder, open_text_encoder
from mlcd.encoders.encoder import Encoder
from mlcd.encoders.endpoint_forms import is_endpoint
from mlcd.encoders.text_encoder import TextEncoder
from mlcd.models.text_as_ids import Utf8Tokenizer
from mlcd.models.text_part import FOLDER
from mlcd.models.tokenizer import Tokenizer
from mlcd.service.inference.engine.fake import PREFIX, FakeEncoder, FakeTextEncoder, fake_tokenizer
from mlcd.service.inference.served import EngineOptions


def open_images(options: EngineOptions) -> Encoder:
    """Opens the image tower. Raises the errors of `mlcd.encoders.open_encoder`."""
    if options.spec.startswith(PREFIX):
        return FakeEncoder(options.spec)
    return open_encoder(options.spec, options.encoder)


def open_texts(options: EngineOptions) -> TextEncoder:
    """Opens the text tower. Raises the errors of `mlcd.encoders.open_text_encoder`."""
    if options.spec.startswith(PREFIX):
        return FakeTextEncoder(options.spec)
    return open_text_encoder(options.spec, options.encoder)


def find_tokenizer(spec: str) -> Tokenizer | None:
    """Returns the tokenizer of a model; None if the model embeds only images.

    Raises ArtifactInvalid for a damaged tokenizer.
    """
    if spec.startswith(PREFIX):
        return fake_tokenizer(spec)
    if not has_text(spec):
        return None
    return Utf8Tokenizer() if is_endpoint(spec) else Tokenizer.open(Path(spec) / FOLDER)
