"""Texts to the token ids of a model, by the vocabulary that lies with its weights.

The `tokenizers` library does the work; this module reads which padding the model was trained with.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ArtifactInvalid, ConfigInvalid, InvalidInput
from mlcd.extras import install_command
from mlcd.models.json_files import read_object
from mlcd.text_checks import is_unicode

try:
    import tokenizers
    from tokenizers import Regex, normalizers
except ImportError as error:
    raise ConfigInvalid(
        "texts need the package tokenizers", remedy=install_command("text")
    ) from error

TOKENIZER: Final = "tokenizer.json"
_CONFIG: Final = "tokenizer_config.json"
_SPECIAL_TOKENS: Final = "special_tokens_map.json"
_NOT_UNICODE: Final = "a text must be valid Unicode, got half of a surrogate pair"
# Of a long text so many characters for each token of the context are read at first, then so many,
# then all. Ordinary text has about 5 a token.
_CHARS_PER_TOKEN: Final = (6, 24)
# WordPiece takes a word of more than 100 characters for one unknown token. A beginning that ends
# within a word has so much more of it.
_LEAST_CHARS: Final = 512
_SIGLIP2: Final = "Siglip2Tokenizer"
# string.punctuation, and what Python's \s matches
_PUNCTUATION: Final = r"[!-/:-@\[-`{-~]"
_SPACES: Final = r"[\s\x1c-\x1f]+"


@dataclass(frozen=True)
class Tokenized:
    """The tokens of texts.

    ids: [N, context_length] with padding. num: [N], tokens of each text without padding. cut: [N],
    whether a text was longer; False everywhere where that was not asked for.
    """

    ids: NDArray[np.int64]
    num: NDArray[np.int64]
    cut: NDArray[np.bool_]


class Tokenizer:
    """The tokenizer of one model: every text becomes `context_length` ids, cut or padded."""

    def __init__(
        self, backend: tokenizers.Tokenizer, settings: dict[str, Any], context_length: int
    ) -> None:
        """backend: cuts and pads to `context_length`. settings: the fields of
        tokenizer_config.json.
        """
        self._backend = backend
        self._settings = settings
        self.context_length = context_length

    @property
    def num_ids(self) -> int:
        """Returns one more than the highest id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def pad_id(self) -> int:
        return int(self._padding["pad_id"])

    @property
    def pads_right(self) -> bool:
        return bool(self._padding["direction"] == "right")

    @property
    def ends_with_padding(self) -> bool:
        """Tells whether the token that ends a text also pads, as in CLIP's vocabulary."""
        nothing = self._backend.encode("")
        pairs = zip(nothing.ids, nothing.attention_mask, strict=True)
        return [id_ for id_, is_token in pairs if is_token][-1:] == [self.pad_id]

    @property
    def _padding(self) -> dict[str, Any]:
        assert self._backend.padding is not None
        return self._backend.padding

    def __call__(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Returns the ids, [N, context_length]; raises InvalidInput for a string that is no
        valid Unicode.
        """
        return self.tokenize(texts).ids

    def tokenize(self, texts: Sequence[str], *, with_cut: bool = False) -> Tokenized:
        """Returns the ids with their numbers; with_cut: says which texts were cut. Raises as
        `__call__`.
        """
        encodings = self._encodings(texts)
        ids = np.empty((len(encodings), self.context_length), np.int64)
        for row, encoding in zip(ids, encodings, strict=True):
            row[:] = encoding.ids
        num = np.array([sum(encoding.attention_mask) for encoding in encodings], np.int64)
        cut = [with_cut and bool(encoding.overflowing) for encoding in encodings]
        return Tokenized(ids, num, np.array(cut, np.bool_))

    def _encodings(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        """Returns the encodings, for which a long text is not read to its end.

        The tokens that the model reads are in its beginning; the library would make all the others,
        too.
        """
        encodings: dict[int, tokenizers.Encoding] = {}
        for chars_per_token in _CHARS_PER_TOKEN if self._cuts_right else ():
            most = max(chars_per_token * self.context_length, _LEAST_CHARS)
            beginnings = {
                place: _beginning(text, most)
                for place, text in enumerate(texts)
                if place not in encodings and len(text) > most
            }
            encoded = self._encode([text for text, _ in beginnings.values()])
            for (place, (_, at_space)), encoding in zip(beginnings.items(), encoded, strict=True):
                if len(encoding.overflowing) >= (1 if at_space else 2):
                    _check_unicode(texts[place])
                    encodings[place] = encoding
        remaining = [place for place in range(len(texts)) if place not in encodings]
        encodings_of_rest = self._encode([texts[place] for place in remaining])
        encodings.update(zip(remaining, encodings_of_rest, strict=True))
        return [encodings[place] for place in range(len(texts))]

    def _encode(self, texts: list[str]) -> list[tokenizers.Encoding]:
        try:
            encodings: list[tokenizers.Encoding] = self._backend.encode_batch(texts)
        except TypeError as error:  # half of a surrogate pair
            raise InvalidInput(_NOT_UNICODE) from error
        return encodings

    @property
    def _cuts_right(self) -> bool:
        truncation = self._backend.truncation
        return bool(truncation and truncation["direction"] == "right")

    @classmethod
    def read(cls, directory: Path, context_length: int) -> "Tokenizer":
        """Reads tokenizer.json and tokenizer_config.json.

        Raises ArtifactInvalid naming the file that is missing, damaged or silent about padding.
        """
        path = directory / TOKENIZER
        if not path.is_file():
            raise ArtifactInvalid(
                f"{directory} lacks {TOKENIZER}",
                remedy="save it with transformers: AutoTokenizer.from_pretrained(NAME)"
                ".save_pretrained(DIRECTORY)",
            )
        backend = _read_backend(path)
        settings = read_object(directory / _CONFIG)
        pad_token = _pad_token(directory, settings)
        if (pad_id := backend.token_to_id(pad_token)) is None:
            raise ArtifactInvalid(f"{path} lacks the token {pad_token}, which {_CONFIG} pads with")
        kind = settings.get("tokenizer_class")
        # Siglip2Tokenizer pads on the left where nothing is stated, all others on the right
        padded = _side(directory, settings, "padding_side", "left" if kind == _SIGLIP2 else "right")
        cut = _side(directory, settings, "truncation_side", "right")
        backend.enable_padding(
            length=context_length, pad_id=pad_id, pad_token=pad_token, direction=padded
        )
        backend.enable_truncation(context_length, direction=cut)
        _normalize_as_class_does(backend, kind)
        return cls(backend, settings, context_length)

    @classmethod
    def open(cls, directory: Path) -> "Tokenizer":
        """Reads the tokenizer.json of a model artifact, which states padding and truncation itself;
        raises ArtifactInvalid.
        """
        backend = _read_backend(path := directory / TOKENIZER)
        padding, truncation = backend.padding, backend.truncation
        if not padding or not truncation or padding["length"] != truncation["max_length"]:
            raise ArtifactInvalid(
                f"{path} does not state one length for padding and truncation",
                remedy="export the model again",
            )
        config = directory / _CONFIG
        settings = read_object(config) if config.is_file() else {}
        return cls(backend, settings, int(padding["length"]))

    def definition(self) -> str:
        """Returns all that the tokenizer does to a text, as JSON."""
        definition: str = self._backend.to_str()
        return definition

    def write(self, directory: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which transformers reads too."""
        self._backend.save(str(directory / TOKENIZER))
        (directory / _CONFIG).write_text(
            json.dumps(self._settings, indent=2, sort_keys=True) + "\n"
        )


def _beginning(text: str, most: int) -> tuple[str, bool]:
    """Returns at most so many characters of a longer text, and whether they end before a space.

    Words have tokens of their own, so those of a beginning that ends with a word are those of the
    text. A beginning without spaces in its second half may end within a token, and its last tokens
    depend on what follows.
    """
    end = text.rfind(" ", most // 2, most)
    return (text[:most], False) if end < 0 else (text[:end].rstrip(), True)


def _check_unicode(text: str) -> None:
    if not is_unicode(text):
        raise InvalidInput(_NOT_UNICODE)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ArtifactInvalid(
            f"{path} cannot be read as a tokenizer", remedy="restore the file"
        ) from error


def _normalize_as_class_does(backend: tokenizers.Tokenizer, kind: object) -> None:
    """Adds what transformers' class does to a text before tokenizer.json does.

    Each step may be in the file already: done twice, it changes nothing more.
    """
    steps: list[normalizers.Normalizer] = []
    if kind == _SIGLIP2:
        steps = [normalizers.Lowercase()]
    if kind == "SiglipTokenizer":
        steps = [
            normalizers.Lowercase(),
            normalizers.Replace(Regex(_PUNCTUATION), ""),
            normalizers.Replace(Regex(_SPACES), " "),
            normalizers.Strip(),
        ]
    if steps:
        own = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([*steps, *own])


def _pad_token(directory: Path, settings: dict[str, Any]) -> str:
    token = settings.get("pad_token")
    if token is None and (directory / _SPECIAL_TOKENS).is_file():
        token = read_object(directory / _SPECIAL_TOKENS).get("pad_token")
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        raise ArtifactInvalid(
            f"{directory / _CONFIG} does not say which token pads", remedy="add its pad_token"
        )
    return token


def _side(directory: Path, settings: dict[str, Any], name: str, unstated: str) -> str:
    side = settings.get(name, unstated)
    if side not in ("left", "right"):
        raise ArtifactInvalid(
            f"{directory / _CONFIG}: {name} is {side!r}", remedy="left and right are known"
        )
    return str(side)
