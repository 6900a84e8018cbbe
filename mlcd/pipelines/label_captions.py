"""Labels images with the tokens of their captions, to train a classifier on them instead of on
clusters (SuperClass: Huang et al., 2024).
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

_MIN_IMAGES: Final = 2  # per token; a token of a single image relates it to no other image


def label_captions(images: str, out: Path, reporter: Reporter, *, top: int) -> Artifact:
    """Labels each image with the `top` rarest tokens of its captions, by BERT's tokenizer.

    The score of a token is log(images / images with the token). Images without a caption get no
    label. Raises InvalidInput if fewer than two tokens occur in two or more images.
    """
    source = open_source(images)
    tokenizer = _open_tokenizer()
    captions = read_captions(source, source.entries)
    captions.unmatched.check(f"the captions of {images}", images, may_be_unmatched=True)
    if captions.unmatched.num:
        _log.warning("captions of %s: %s", images, captions.unmatched)
    tokens = _tokenize(tokenizer, captions)
    num_images = Counter(token for image_tokens in tokens for token in image_tokens)
    label_tokens = sorted(token for token, count in num_images.items() if count >= _MIN_IMAGES)
    if len(label_tokens) < 2:
        raise InvalidInput(
            f"labels need at least 2 tokens that captions of two images in {images} share, got"
            f" {len(label_tokens)}",
            remedy="add captions; docs/how-to/own-images.md says where to put them",
        )
    label_ids = {token: index for index, token in enumerate(label_tokens)}
    scores = {token: math.log(len(tokens) / num_images[token]) for token in label_tokens}
    tokens_of = dict(zip(source.entries.keys(), tokens, strict=True))

    def labels_of(entry: Entry) -> list[tuple[int, float]]:
        image_tokens = [token for token in tokens_of[entry.key] if token in label_ids]
        image_tokens.sort(key=lambda token: (-scores[token], token))
        return [(label_ids[token], scores[token]) for token in image_tokens]

    names = [tokenizer.id_to_token(token) for token in label_tokens]
    # the identity of the images does not cover their captions
    facts = {"of": "tokens", "tokens_sha256": sha256(json.dumps(tokens).encode()).hexdigest()}
    return label_by(source, labels_of, names, out, top=top, facts=facts, reporter=reporter)


def _open_tokenizer() -> Any:
    # imported here: only these labels need a vocabulary
    from mlcd.export.starter.sentences import sentence_tokenizer

    tokenizer = sentence_tokenizer()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _tokenize(tokenizer: Any, captions: Captions) -> Sequence[tuple[int, ...]]:
    """Returns the distinct token ids of each image, in order of first occurrence."""
    tokens = []
    for index in range(len(captions)):
        encoded = tokenizer.encode_batch(list(captions.of(index)), add_special_tokens=False)
        tokens.append(tuple({token: None for encoding in encoded for token in encoding.ids}))
    return tokens
