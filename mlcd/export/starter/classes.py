"""The names, synonyms and definitions of ImageNet's 1,000 classes.

The file's licenses are in LICENSES.md beside it.
"""

from dataclasses import dataclass
from importlib.resources import files
from typing import Final

import numpy as np

from mlcd.types import Embeddings, unit_rows

FILE: Final = "imagenet_classes.tsv"
SENTENCES_FILE: Final = "class_sentences.npy"


@dataclass(frozen=True)
class ImageClass:
    """One class. words: WordNet's words for it, the most frequent first."""

    name: str
    words: tuple[str, ...]
    definition: str

    def descriptions(self) -> list[str]:
        """Returns the texts that describe an image of this class, without duplicates."""
        names = dict.fromkeys([self.name, *self.words, f"{self.name}, {self.definition}"])
        return [f"a photo of a {name}" for name in names]


def imagenet_words() -> list[str]:
    """Returns the names and synonyms of all classes, without duplicates (in any case)."""
    words = (
        word
        for image_class in imagenet_classes()
        for word in (image_class.name, *image_class.words)
    )
    words_by_folded: dict[str, str] = {}
    for word in words:
        words_by_folded.setdefault(word.casefold(), word)
    return list(words_by_folded.values())


def class_descriptions() -> list[str]:
    """Returns the descriptions of all classes, one class after the other."""
    return [text for image_class in imagenet_classes() for text in image_class.descriptions()]


def class_sentences() -> Embeddings:
    """Returns the sentence encoder's unit rows of `class_descriptions()`: float32 [T, 384], stored
    in half precision. `python -m tests.starter_sentences` writes the file.
    """
    with files("mlcd.export.starter").joinpath(SENTENCES_FILE).open("rb") as file:
        return unit_rows(np.load(file, allow_pickle=False).astype(np.float32))


def imagenet_classes() -> list[ImageClass]:
    """Returns all classes, in the standard order of ImageNet classifiers."""
    lines = files("mlcd.export.starter").joinpath(FILE).read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines[1:])
    return [
        ImageClass(name, tuple(words.split(", ")), definition) for name, words, definition in rows
    ]
