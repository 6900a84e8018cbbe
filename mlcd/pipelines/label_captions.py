"""Images to the tokens of their captions, which train a classifier as clusters do (SuperClass:
Huang et al., 2024).
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from mlcd.artifacts.manifest import Artifact
from mlcd.errors import InvalidInput
from mlcd.images.captions import Captions, read_captions
from mlcd.images.entries import Entry
from mlcd.images.sources import open_source
from mlcd.pipelines.label_classes import label_by
from mlcd.progress import Reporter

_log = logging.getLogger(__name__)

_FEWEST: Final = 2  # images; a token of one alone tells nothing about others


def label_captions(images: str, out: Path, reporter: Reporter, *, top: int) -> Artifact:
    """Labels each image with the `top` rarest tokens of its captions, by BERT's tokenizer.

    The score of a token is the logarithm of the images for each one that has it. Images without a
    caption get no label. Raises InvalidInput where fewer than two tokens have two images.
    """
    source = open_source(images)
    tokenizer = _tokenizer()
    captions = read_captions(source, source.entries)
    captions.unmatched.check(f"the captions of {images}", images, may_be_unmatched=True)
    if captions.unmatched.num:
        _log.warning("captions of %s: %s", images, captions.unmatched)
    tokens = _tokens(tokenizer, captions)
    images_of = Counter(token for image_tokens in tokens for token in image_tokens)
    chosen = sorted(token for token, num in images_of.items() if num >= _FEWEST)
    if len(chosen) < 2:
        raise InvalidInput(
            f"labels need at least 2 tokens that captions of {images} share, got {len(chosen)}",
            remedy="docs/how-to/own-images.md says where captions lie",
        )
    number = {token: index for index, token in enumerate(chosen)}
    score_of = {token: math.log(len(tokens) / images_of[token]) for token in chosen}
    rows = dict(zip(source.entries.keys(), tokens, strict=True))

    def labels_of(entry: Entry) -> list[tuple[int, float]]:
        chosen_tokens = [token for token in rows[entry.key] if token in number]
        chosen_tokens.sort(key=lambda token: (-score_of[token], token))
        return [(number[token], score_of[token]) for token in chosen_tokens]

    names = [tokenizer.id_to_token(token) for token in chosen]
    # Captions are no part of what identifies the images.
    facts = {"of": "tokens", "tokens_sha256": sha256(json.dumps(tokens).encode()).hexdigest()}
    return label_by(source, labels_of, names, out, top=top, facts=facts, reporter=reporter)


def _tokenizer() -> Any:
    # It reads a vocabulary, which no other labels need.
    from mlcd.export.starter.sentences import sentence_tokenizer

    tokenizer = sentence_tokenizer()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _tokens(tokenizer: Any, captions: Captions) -> Sequence[tuple[int, ...]]:
    """Returns the distinct tokens of each image."""
    tokens = []
    for index in range(len(captions)):
        encoded = tokenizer.encode_batch(list(captions.of(index)), add_special_tokens=False)
        tokens.append(tuple({token: None for encoding in encoded for token in encoding.ids}))
    return tokens
