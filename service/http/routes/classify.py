"""The route that classifies images by names: zero-shot classification."""

import asyncio
from functools import partial
from typing import Any, Final

import numpy as np
import orjson
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from starlette.responses import Response

from mlcd.encoders.text_encoder import Calibration
from mlcd.errors import InvalidInput, Rejection, TextRejected
from mlcd.models.prompts import class_rows, prompt, templates
from mlcd.service.deadline import within_deadline
from mlcd.service.errors import BadRequest, StrictBatch, TooLarge
from mlcd.service.http.access import AppResources, ModelName, use_model
from mlcd.service.http.answers import check_answer_bytes, headers, list_answer, provenance
from mlcd.service.http.auth import needs
from mlcd.service.http.bodies import media_type, read_form, read_json, validate
from mlcd.service.http.encoding import encode
from mlcd.service.http.json_route import JsonRoute
from mlcd.service.http.openapi import BINARY, json_body
from mlcd.service.http.problems import item_error
from mlcd.service.http.queries import Queries, check_names, check_top, drop_nulls, queries_from_json
from mlcd.service.http.text_encoding import (
    check_num_chars,
    check_num_texts,
    encode_with_tower,
    require_texts,
    run_both,
)
from mlcd.service.inference.served_texts import ServedTexts
from mlcd.service.keys.rates import ComputedAccount
from mlcd.service.resources import Resources
from mlcd.service.settings import Limits
from mlcd.service.telemetry.request import count_texts, time_stage
from mlcd.text_checks import check_text
from mlcd.types import Embeddings, cosines
from mlcd.wire.embedding import ClassifiedImages, ClassifyOptions, ClassifyRequest

router = APIRouter(tags=["labels"], route_class=JsonRoute)

_OPTIONS: Final = tuple(ClassifyOptions.model_fields)
_RESULT_BYTES: Final = 60  # field names and numbers of a result in JSON
_NO_TEMPLATES: Final = ("{}",)
_FORM: Final[dict[str, Any]] = {
    "schema": {
        "type": "object",
        "required": ["files", "names"],
        "properties": {
            "files": {"type": "array", "minItems": 1, "items": BINARY["schema"]},
            "names": {"type": "string", "description": 'JSON: ["a dog", "a cat"]'},
            "templates": {"type": "string", "description": "simple, clip, or a JSON list"},
            "top": {"type": "string", "pattern": "^[0-9]+$"},
        },
    }
}
_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {200: {"model": ClassifiedImages}, 404: {}}


@router.post(
    "/v1/classify",
    dependencies=[needs("embed")],
    response_class=Response,
    responses=_ANSWERS,
    openapi_extra=json_body(ClassifyRequest, **{"multipart/form-data": _FORM}),
)
async def classify(request: Request, resources: AppResources, model: ModelName = None) -> Response:
    """Finds the names that fit each image best, with their probabilities.

    If the model scores each image-text pair independently, like SigLIP, the probabilities of an
    image do not add up to 1. With `templates`, a name is embedded as the mean of its prompts,
    otherwise as its own text. A model without a text tower answers 422.
    """
    resources = await use_model(model, request, resources)
    tower = require_texts(resources, param="names")
    if media_type(request) == "application/json":
        content = drop_nulls(await read_json(request, resources))
        options = _pop_options(content)
        check_names(content, (*_OPTIONS, "images", "embeddings"), request)
        (items,) = content.values() if len(content) == 1 else (None,)
        if not isinstance(items, list):
            raise BadRequest("the body must have one list, either `images` or `embeddings`")
        _check_limits(options, resources)
        reading = queries_from_json(request, content, resources)
    else:
        files, fields = await read_form(request, resources.settings.limits, texts=_OPTIONS)
        options = _pop_options(_parse_fields(fields))
        _check_limits(options, resources)
        reading = _encode_files(request, files, resources)
    rows, queries = await run_both(_embed_names(request, options, tower, resources), reading)
    loop = asyncio.get_running_loop()
    work = partial(_rank_names, queries.embeddings, rows, tower.encoder.calibration, options.top)
    with time_stage("classify"):
        ranked = await within_deadline(
            loop.run_in_executor(resources.compute, work), request.state.deadline
        )
    calibration = tower.encoder.calibration
    num_bytes = _estimate_bytes(options.names, ranked[0])
    check_answer_bytes(num_bytes, resources.settings.limits, remedy="give a smaller `top`")
    return list_answer(
        {
            **provenance(resources),
            "calibration": {"scale": calibration.scale, "bias": calibration.bias},
            "errors": [item_error(index, error) for index, error in queries.errors.items()],
        },
        [
            partial(_build_result, index, options.names, *columns)
            for index, columns in zip(queries.rows, zip(*ranked, strict=True), strict=True)
        ],
        headers(resources, queries.encoded),
        resources,
        num_items=ranked[0].size,
        num_bytes=num_bytes,
    )


def _pop_options(content: dict[str, Any]) -> ClassifyOptions:
    """Removes the options from `content`, and validates them."""
    options = {name: content.pop(name) for name in _OPTIONS if name in content}
    return validate(ClassifyOptions, options)


def _check_limits(options: ClassifyOptions, resources: Resources) -> None:
    limits = resources.settings.limits
    check_top(options.top, resources)
    check_num_texts(len(options.names), limits)
    num = len(options.names) * len(_select_templates(options))
    if num > limits.max_prompts:
        raise TooLarge(
            f"a request must have at most {limits.max_prompts} prompts, got {num}",
            limit="max_prompts",
        )
    check_num_chars(_count_prompt_chars(options), limits)


def _count_prompt_chars(options: ClassifyOptions) -> int:
    """Returns the number of characters of all prompts, without building the prompts."""
    name_templates = _select_templates(options)
    fixed = sum(len(template) for template in name_templates)
    return len(options.names) * fixed + len(name_templates) * sum(map(len, options.names))


def _parse_fields(fields: dict[str, str]) -> dict[str, Any]:
    """Returns the options in a form's fields, where lists are in JSON."""
    content: dict[str, Any] = {}
    for name, text in fields.items():
        is_json = name in ("names", "top") or text.startswith("[")
        try:
            content[name] = orjson.loads(text) if is_json else text
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"{name} must be JSON", param=name) from error
    return content


async def _encode_files(request: Request, images: list[bytes], resources: Resources) -> Queries:
    encoded = await encode(request, resources, images)
    return Queries(encoded.embeddings, encoded.rows, encoded.errors, encoded)


def _select_templates(options: ClassifyOptions) -> tuple[str, ...]:
    match options.templates:
        case None:
            return _NO_TEMPLATES
        case "simple" | "clip" as name:
            return templates(name)
        case _:
            return tuple(options.templates)


async def _embed_names(
    request: Request, options: ClassifyOptions, tower: ServedTexts, resources: Resources
) -> Embeddings:
    """Returns the embedding of each name, [C, D]. Raises StrictBatch for a name without one.

    Prompts that are not cached count against the rate limit of the client's key. Prompts computed
    before the deadline are cached, so a retry of the request continues.
    """
    limits = resources.settings.limits
    loop = asyncio.get_running_loop()
    prompts = await loop.run_in_executor(resources.compute, _build_prompts, options, limits)
    count_texts(len(prompts))
    account = ComputedAccount(resources.rate_limiter, request.state.key)
    num_templates = len(prompts) // len(options.names)
    rows = []
    for start in range(0, len(prompts), limits.max_texts):
        batch = prompts[start : start + limits.max_texts]
        encoding = encode_with_tower(
            tower, batch, deadline=request.state.deadline, account=account, owner=account.owner
        )
        encoded = (await encoding).encoded
        if encoded.errors:
            index, error = min(encoded.errors.items())
            raise _bad_name((start + index) // num_templates, error)
        rows.append(encoded.embeddings)
    shape = (len(options.names), num_templates, -1)
    return await loop.run_in_executor(
        resources.compute, lambda: class_rows(np.concatenate(rows).reshape(shape))
    )


def _build_prompts(options: ClassifyOptions, limits: Limits) -> list[str]:
    """Returns the prompts of all names, grouped by name."""
    prompts = []
    name_templates = _select_templates(options)
    _check_unique(options.names)
    for index, name in enumerate(options.names):
        if isinstance(rejection := check_text(name, max_chars=limits.max_text_chars), TextRejected):
            raise _bad_name(index, rejection)
        try:
            prompts += [prompt(template, name) for template in name_templates]
        except InvalidInput as error:
            raise BadRequest(error.message, param="templates") from error
    return prompts


def _check_unique(names: list[str]) -> None:
    """Raises BadRequest for a repeated name: each copy would get half of the probability."""
    unique_names = set[str]()
    for index, name in enumerate(names):
        if name in unique_names:
            param = f"names[{index}]"
            raise BadRequest(
                f"{param} repeats an earlier name", remedy="send each name once", param=param
            )
        unique_names.add(name)


def _bad_name(index: int, error: Rejection) -> StrictBatch:
    return StrictBatch(index, error, param=f"names[{index}]")


def _rank_names(
    images: Embeddings, names: Embeddings, calibration: Calibration, top: int
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    """Returns the `top` names of each image, best first: indexes, probabilities, cosines."""
    similarities = cosines(images @ names.T)
    order = np.argsort(-similarities, axis=1, kind="stable")[:, :top]
    probabilities = calibration.probabilities(similarities)
    return (
        order,
        np.take_along_axis(probabilities, order, axis=1),
        np.take_along_axis(similarities, order, axis=1),
    )


def _estimate_bytes(names: list[str], order: NDArray[np.int64]) -> int:
    """Returns the approximate size of the answer."""
    lengths = np.array([len(name) for name in names], dtype=np.int64)
    return int(lengths[order].sum()) + _RESULT_BYTES * order.size


def _build_result(
    index: int,
    names: list[str],
    order: NDArray[np.int64],
    probabilities: NDArray[np.float32],
    similarities: NDArray[np.float32],
) -> dict[str, Any]:
    ranked = [
        {"name": names[rank], "probability": float(probability), "similarity": float(similarity)}
        for rank, probability, similarity in zip(order, probabilities, similarities, strict=True)
    ]
    return {"index": index, "names": ranked}
