"""Tokenizes texts with the vocabulary beside a model's weights.

The `tokenizers` library does the work; this module adds the padding that the model trained with.
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
# Long texts are tokenized from a prefix of 6 characters per context token; if that is too short,
# from 24; then in full. Ordinary text has about 5 characters per token.
_CHARS_PER_TOKEN: Final = (6, 24)
# WordPiece maps a word of over 100 characters to one unknown token, so a prefix that cuts a word
# must contain more than 100 characters of it.
_MIN_PREFIX_CHARS: Final = 512
_SIGLIP2: Final = "Siglip2Tokenizer"
# string.punctuation, and what Python's \s matches
_PUNCTUATION: Final = r"[!-/:-@\[-`{-~]"
_SPACES: Final = r"[\s\x1c-\x1f]+"


@dataclass(frozen=True)
class Tokenized:
    """The tokens of texts.

    ids: [N, context_length] with padding. num: [N], number of tokens without padding. cut: [N],
    whether the text was truncated; all False unless `with_cut` was given.
    """

    ids: NDArray[np.int64]
    num: NDArray[np.int64]
    cut: NDArray[np.bool_]


class Tokenizer:
    """The tokenizer of one model: truncates or pads every text to `context_length` ids."""

    def __init__(
        self, backend: tokenizers.Tokenizer, settings: dict[str, Any], context_length: int
    ) -> None:
        """backend: truncates and pads to `context_length`. settings: the fields of
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
        """Tells whether the end-of-text token is also the padding token, as in CLIP."""
        encoding = self._backend.encode("")
        pairs = zip(encoding.ids, encoding.attention_mask, strict=True)
        return [id_ for id_, is_token in pairs if is_token][-1:] == [self.pad_id]

    @property
    def _padding(self) -> dict[str, Any]:
        assert self._backend.padding is not None
        return self._backend.padding

    def __call__(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Returns the ids, [N, context_length]; raises InvalidInput for a string that is not valid
        Unicode.
        """
        return self.tokenize(texts).ids

    def tokenize(self, texts: Sequence[str], *, with_cut: bool = False) -> Tokenized:
        """Returns ids and token counts; with_cut: also report which texts were truncated.

        Raises InvalidInput like `__call__`.
        """
        encodings = self._encode_prefixes(texts)
        ids = np.empty((len(encodings), self.context_length), np.int64)
        for row, encoding in zip(ids, encodings, strict=True):
            row[:] = encoding.ids
        num = np.array([sum(encoding.attention_mask) for encoding in encodings], np.int64)
        cut = [with_cut and bool(encoding.overflowing) for encoding in encodings]
        return Tokenized(ids, num, np.array(cut, np.bool_))

    def _encode_prefixes(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        """Encodes texts, tokenizing only a prefix of long ones.

        The library would tokenize the whole text and then discard all beyond the context length.
        """
        encodings: dict[int, tokenizers.Encoding] = {}
        for chars_per_token in _CHARS_PER_TOKEN if self._truncates_right else ():
            max_chars = max(chars_per_token * self.context_length, _MIN_PREFIX_CHARS)
            prefixes = {
                index: _prefix(text, max_chars)
                for index, text in enumerate(texts)
                if index not in encodings and len(text) > max_chars
            }
            encoded = self._encode([text for text, _ in prefixes.values()])
            for (index, (_, at_space)), encoding in zip(prefixes.items(), encoded, strict=True):
                if len(encoding.overflowing) >= (1 if at_space else 2):
                    _check_unicode(texts[index])
                    encodings[index] = encoding
        pending = [index for index in range(len(texts)) if index not in encodings]
        full_encodings = self._encode([texts[index] for index in pending])
        encodings.update(zip(pending, full_encodings, strict=True))
        return [encodings[index] for index in range(len(texts))]

    def _encode(self, texts: list[str]) -> list[tokenizers.Encoding]:
        try:
            encodings: list[tokenizers.Encoding] = self._backend.encode_batch(texts)
        except TypeError as error:  # half of a surrogate pair
            raise InvalidInput(_NOT_UNICODE) from error
        return encodings

    @property
    def _truncates_right(self) -> bool:
        truncation = self._backend.truncation
        return bool(truncation and truncation["direction"] == "right")

    @classmethod
    def read(cls, directory: Path, context_length: int) -> "Tokenizer":
        """Reads tokenizer.json and tokenizer_config.json.

        Raises ArtifactInvalid naming the file that is missing, damaged or without a padding token.
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
        # Siglip2Tokenizer pads on the left by default, all other classes on the right
        default = "left" if kind == _SIGLIP2 else "right"
        padding_side = _read_side(directory, settings, "padding_side", default)
        truncation_side = _read_side(directory, settings, "truncation_side", "right")
        backend.enable_padding(
            length=context_length, pad_id=pad_id, pad_token=pad_token, direction=padding_side
        )
        backend.enable_truncation(context_length, direction=truncation_side)
        _add_normalization_of_class(backend, kind)
        return cls(backend, settings, context_length)

    @classmethod
    def open(cls, directory: Path) -> "Tokenizer":
        """Reads the tokenizer.json of a model artifact, which includes padding and truncation.

        Raises ArtifactInvalid if the file is damaged or lacks either.
        """
        backend = _read_backend(path := directory / TOKENIZER)
        padding, truncation = backend.padding, backend.truncation
        if not padding or not truncation or padding["length"] != truncation["max_length"]:
            raise ArtifactInvalid(
                f"{path} must have one length for padding and truncation",
                remedy="export the model again",
            )
        config = directory / _CONFIG
        settings = read_object(config) if config.is_file() else {}
        return cls(backend, settings, int(padding["length"]))

    def definition(self) -> str:
        """Returns the tokenizer, including padding and truncation, as JSON."""
        definition: str = self._backend.to_str()
        return definition

    def write(self, directory: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which transformers reads too."""
        self._backend.save(str(directory / TOKENIZER))
        (directory / _CONFIG).write_text(
            json.dumps(self._settings, indent=2, sort_keys=True) + "\n"
        )


def _prefix(text: str, max_chars: int) -> tuple[str, bool]:
    """Returns a prefix of at most max_chars characters, and whether it ends at a space.

    Tokens never span a space, so a prefix that ends at a space has the same tokens as the full
    text. A prefix without a space in its second half may end within a token: its last tokens may
    differ from the full text's.
    """
    end = text.rfind(" ", max_chars // 2, max_chars)
    return (text[:max_chars], False) if end < 0 else (text[:end].rstrip(), True)


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


def _add_normalization_of_class(backend: tokenizers.Tokenizer, kind: object) -> None:
    """Prepends the normalization that a tokenizer class of transformers does in Python.

    tokenizer.json may contain the same steps; all are idempotent.
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
            f"{directory / _CONFIG} must name the padding token", remedy="add its pad_token"
        )
    return token


def _read_side(directory: Path, settings: dict[str, Any], name: str, default: str) -> str:
    side = settings.get(name, default)
    if side not in ("left", "right"):
        raise ArtifactInvalid(
            f'{directory / _CONFIG}: {name} must be "left" or "right", got {side!r}'
        )
    return str(side)
