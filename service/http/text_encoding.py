"""Encodes a request's texts, alone or together with images, to embeddings."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
from fastapi import Request

from mlcd.errors import Rejection
from mlcd.service.deadline import within_deadline
from mlcd.service.errors import BadRequest, StrictBatch, TextNotSupported, TooLarge
from mlcd.service.fetch.image_url import RequestImage
from mlcd.service.http.encoding import encode, encode_strictly
from mlcd.service.inference.outcomes import Account, Encoded, slowest
from mlcd.service.inference.served_texts import ServedTexts
from mlcd.service.inference.text_pipeline import num_chars
from mlcd.service.resources import Resources
from mlcd.service.settings import Limits
from mlcd.service.telemetry.request import count_texts, count_used


@dataclass(frozen=True)
class RequestText:
    """A text of a request, not validated: the value may have any JSON type."""

    value: object


RequestItem: TypeAlias = RequestImage | RequestText
_First = TypeVar("_First")
_Second = TypeVar("_Second")


@dataclass(frozen=True)
class EncodedTexts:
    """The embeddings of texts, or of texts and images. num_tokens: tokens of all texts."""

    encoded: Encoded
    num_tokens: int


def require_texts(resources: Resources, *, param: str) -> ServedTexts:
    """Returns the model's text tower. Raises TextNotSupported, with `param`, if it has none."""
    if resources.texts is None:
        raise TextNotSupported(resources.encoder.name, param=param)
    return resources.texts


def rejects_long(truncate: str | None) -> bool:
    """Tells whether to refuse a text that exceeds the model's context, instead of truncating it.

    truncate: value in the API of Cohere and NIM. Raises BadRequest for START, which no tokenizer
    here supports.
    """
    if truncate == "START":
        raise BadRequest(
            "truncate must be END or NONE, got START: this model truncates texts at the end",
            remedy="use END or NONE",
            param="truncate",
        )
    return truncate == "NONE"


def check_num_texts(num: int, limits: Limits) -> None:
    if num > limits.max_texts:
        raise TooLarge(
            f"a request must have at most {limits.max_texts} texts, got {num}", limit="max_texts"
        )


def check_num_chars(num: int, limits: Limits) -> None:
    if num > limits.max_request_chars:
        raise TooLarge(
            f"the texts of a request must have at most {limits.max_request_chars} characters, got"
            f" {num}",
            limit="max_request_chars",
        )


async def encode_texts(
    request: Request,
    resources: Resources,
    texts: Sequence[object],
    *,
    reject_long: bool = False,
) -> EncodedTexts:
    """Encodes texts; a text that fails does not affect the others. Texts count against the rate
    limit of the client's key, like images; a long text counts several times.

    reject_long: reject a text that exceeds the model's context, instead of truncating it.
    Raises TextNotSupported without a text tower, and TooLarge for too many texts.
    """
    tower = require_texts(resources, param="texts")
    limits, key = resources.settings.limits, request.state.key
    check_num_texts(len(texts), limits)
    check_num_chars(num_chars(texts, limits.max_text_chars), limits)
    count_texts(len(texts))
    await resources.rate_limiter.take(key, _count_charged(texts, limits))
    owner = None if key is None else key.id
    return await encode_with_tower(
        tower, texts, deadline=request.state.deadline, reject_long=reject_long, owner=owner
    )


def _count_charged(texts: Sequence[object], limits: Limits) -> int:
    """Returns the number of texts to count against a key's rate limit."""
    return sum(
        max(1, -(-num_chars([text], limits.max_text_chars) // limits.rate_chars)) for text in texts
    )


async def encode_with_tower(
    tower: ServedTexts,
    texts: Sequence[object],
    *,
    deadline: float,
    reject_long: bool = False,
    account: Account | None = None,
    owner: object | None = None,
) -> EncodedTexts:
    """Encodes texts; a text that fails does not affect the others.

    account: charged for texts that are not cached. owner: the client; clients take turns at the
    tokenizer; None for a request without a key.
    """

    async def read_and_encode() -> EncodedTexts:
        with tower.dispatcher.expect_item():
            tokens = await tower.reader.read(texts, reject_long=reject_long, owner=owner)
        encoded = await tower.pipeline.encode(tokens.ids, deadline=deadline, account=account)
        timings = replace(encoded.timings, tokenize_s=tokens.seconds)
        return EncodedTexts(replace(encoded, timings=timings), tokens.num)

    encoded_texts = await within_deadline(read_and_encode(), deadline)
    num_embedded = len(encoded_texts.encoded.rows)
    num_tokens = encoded_texts.num_tokens
    tower.metrics.texts(
        embedded=num_embedded, rejected=len(texts) - num_embedded, tokens=num_tokens
    )
    count_used(texts=num_embedded, tokens=num_tokens)
    return encoded_texts


async def encode_items_strictly(
    request: Request,
    resources: Resources,
    items: Sequence[RequestItem],
    *,
    param: str = "input[{index}]",
    reject_long: bool = False,
) -> EncodedTexts:
    """Encodes all images and texts or raises StrictBatch for the first that failed.

    param: name of the field in the client's dialect. reject_long: see `encode_texts`.
    """
    texts = {index: item.value for index, item in enumerate(items) if isinstance(item, RequestText)}
    images = {index: item for index, item in enumerate(items) if not isinstance(item, RequestText)}
    if not texts:
        encoded = await encode_strictly(request, resources, [*images.values()], param=param)
        return EncodedTexts(encoded, 0)
    require_texts(resources, param=param.format(index=next(iter(texts))))
    reading = encode_texts(request, resources, [*texts.values()], reject_long=reject_long)
    if not images:
        encoded_texts = await reading
        encoded = encoded_texts.encoded
    else:
        encoded_texts, encoded_images = await run_both(
            reading, encode(request, resources, [*images.values()])
        )
        encoded = _merge(encoded_texts.encoded, [*texts], encoded_images, [*images])
    if encoded.errors:
        raise StrictBatch.first_of(encoded.errors, param=param)
    return EncodedTexts(encoded, encoded_texts.num_tokens)


async def run_both(
    first: Coroutine[Any, Any, _First], second: Coroutine[Any, Any, _Second]
) -> tuple[_First, _Second]:
    """Returns both results; if one coroutine fails, the other is canceled."""
    tasks = asyncio.ensure_future(first), asyncio.ensure_future(second)
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _merge(
    texts: Encoded, text_indexes: list[int], images: Encoded, image_indexes: list[int]
) -> Encoded:
    """Returns the embeddings of texts and images in the order of the request."""
    errors: dict[int, Rejection] = {text_indexes[i]: error for i, error in texts.errors.items()}
    errors |= {image_indexes[index]: error for index, error in images.errors.items()}
    rows = [text_indexes[index] for index in texts.rows] + [
        image_indexes[index] for index in images.rows
    ]
    order = np.argsort(rows)
    timings = replace(
        slowest([texts.timings, images.timings]),
        fetch_s=images.timings.fetch_s,
        tokenize_s=texts.timings.tokenize_s,
    )
    return Encoded(
        np.concatenate([texts.embeddings, images.embeddings])[order],
        [rows[index] for index in order],
        errors,
        timings,
        texts.rounded,
    )
