"""The towers of a model by its name, also of the fake one."""

from mlcd.encoders import open_encoder
from mlcd.encoders.encoder import Encoder
from mlcd.encoders.text_encoder import TextEncoder
from mlcd.errors import NoTextTower
from mlcd.models.tokenizer import Tokenizer
from service.inference.engine.fake import PREFIX, FakeEncoder, FakeTextEncoder, fake_tokenizer
from service.inference.served import Opening


def open_images(opening: Opening) -> Encoder:
    """Opens the tower of images. Raises what `mlcd.encoders.open_encoder` raises."""
    if opening.spec.startswith(PREFIX):
        return FakeEncoder(opening.spec)
    return open_encoder(opening.spec, opening.encoder)


def open_texts(opening: Opening) -> TextEncoder:
    """Opens the tower of texts. Raises NoTextTower where the model has none."""
    if opening.spec.startswith(PREFIX):
        return FakeTextEncoder(opening.spec)
    raise NoTextTower(opening.spec)


def find_tokenizer(spec: str) -> Tokenizer | None:
    """Returns the tokenizer of a model's texts; None where the model embeds images only."""
    return fake_tokenizer(spec) if spec.startswith(PREFIX) else None
