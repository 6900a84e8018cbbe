import asyncio
import json
import logging

import pytest
from fastapi import Request
from pydantic import ValidationError

import mlcd.errors
import mlcd.service.errors
from mlcd.errors import ImageRejected, MlcdError, NotFound
from mlcd.service.errors import BadRequest, RecordDamaged, StrictBatch, TooLarge, Unsupported
from mlcd.service.http import problems
from mlcd.service.http.app import create_app
from mlcd.service.http.bodies import validate
from mlcd.service.http.dialects.cohere import EmbedRequest
from mlcd.service.http.dialects.kserve import InferRequest
from mlcd.service.http.dialects.openai import EmbeddingsRequest
from mlcd.service.http.problems import STATUS, bad_field, handle_mlcd_error, handle_unexpected
from mlcd.wire.embedding import TextsRequest
from mlcd.wire.item_search import LayoutItemsRequest, SearchOptions
from mlcd.wire.queued_jobs import JobRequest
from mlcd.wire.served_model import LoadRequest
from mlcd.wire.stored_items import CreateRequest, DeleteRequest

APP = create_app(None)
INPUT = {"name": "image", "shape": [1], "datatype": "BYTES", "data": ["x"]}
SECRET = "SECRET-OF-THE-CLIENT"


def request(path):
    state = {"request_id": "r7"}
    return Request(
        {
            "type": "http",
            "app": APP,
            "path": path,
            "headers": [],
            "state": state,
            "query_string": b"",
        }
    )


def answer(path, error, handle=handle_mlcd_error):
    response = asyncio.run(handle(request(path), error))
    return response.status_code, response.media_type, json.loads(response.body)


def subclasses(cls):
    return {cls, *(below for child in cls.__subclasses__() for below in subclasses(child))}


NAMES = """
500 internal-error MlcdError ArtifactInvalid ConfigInvalid Diverged
500 job-damaged RecordDamaged
422 cannot-be-processed InvalidInput InvalidField ImageRejected TextRejected StrictBatch
422 no-text-tower NoTextTower TextNotSupported
404 not-found NotFound
409 conflict Conflict
503 unavailable Unavailable StoreUnreachable DiskFull TooManyOpenFiles
429 too-many-requests Overloaded RateExceeded
504 deadline-exceeded DeadlineExceeded
400 malformed-request BadRequest
413 too-large TooLarge QuotaExceeded
408 request-timeout TooSlow
421 misdirected-request Misdirected
403 forbidden Forbidden ForeignOrigin OutsideKey OutsideRoots
406 not-acceptable NotAcceptable
415 unsupported-media-type Unsupported
401 unauthorized Unauthorized
507 insufficient-storage StorageFull
"""
ROWS = [line.split() for line in NAMES.strip().splitlines()]


def test_every_error_has_a_stable_name_and_that_a_status():
    known = {
        cls
        for cls in subclasses(MlcdError)
        if cls.__module__ in (mlcd.errors.__name__, mlcd.service.errors.__name__)
    }
    found = {(str(STATUS[cls.name]), cls.name, cls.__name__) for cls in known}
    assert found == {(status, name, each) for status, name, *errors in ROWS for each in errors}
    assert set(STATUS.values()) <= set(problems.TITLES)


def test_the_name_of_an_answer_is_that_of_its_error():
    of_status = {
        int(status): name for status, name, *_ in reversed(ROWS) if name != "no-text-tower"
    }
    assert {status: problems.name_of(status) for status in of_status} == of_status


def test_each_dialect_speaks_its_own_shape():
    error = NotFound("there is no such model", remedy="use m")
    text = "there is no such model: use m"
    openai = {
        "error": {
            "message": text,
            "type": "invalid_request_error",
            "param": None,
            "code": "not-found",
        }
    }
    for path in ("/v1/embeddings", "/embeddings", "/v1/models", "/v1/models/x"):
        assert answer(path, error) == (404, "application/json", openai)
    assert answer("/v2/embed", error) == (404, "application/json", {"id": "r7", "message": text})
    for path in ("/v2", "/v2/models/x/infer", "/v2/embedx", "/v2/nothing"):
        assert answer(path, error) == (404, "application/json", {"error": text})
    own = {"type": "urn:mlcd:problem:not-found", "title": "Not found", "status": 404}
    own |= {"detail": text, "instance": "/v1/labels", "request_id": "r7"}
    assert answer("/v1/labels", error) == (404, "application/problem+json", own)
    assert answer("/embeddingsx", error)[1] == "application/problem+json"


def test_of_the_servers_own_faults_a_client_is_told_of_a_damaged_job_alone():
    _, _, problem = answer("/v1/jobs/1", RecordDamaged())
    assert (problem["status"], problem["type"]) == (500, "urn:mlcd:problem:job-damaged")
    found = problem["detail"]
    assert found == "the record of this job is damaged: DELETE of the job removes it"
    _, _, problem = answer("/v1/jobs/1", mlcd.errors.ArtifactInvalid(f"{SECRET} is damaged"))
    assert (problem["status"], problem["type"]) == (500, "urn:mlcd:problem:internal-error")
    assert SECRET not in problem["detail"]


def test_limit_and_index_are_named_where_they_apply():
    _, _, problem = answer("/v1/labels", TooLarge("too many", limit="max_images"))
    assert (problem["status"], problem["limit"]) == (413, "max_images")
    rejected = ImageRejected("too-many-pixels", "9 pixels")
    strict = StrictBatch.first_of({5: rejected, 3: rejected}, param="input[{index}]")
    _, _, problem = answer("/v1/images/embed", strict)
    assert (problem["status"], problem["index"], problem["limit"]) == (413, 3, "max_pixels")
    assert problem["type"] == "urn:mlcd:problem:too-many-pixels"
    assert answer("/v1/embeddings", strict)[2]["error"]["param"] == "input[3]"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (TooLarge("too many", limit="max_images"), 413, "too-large"),
        (Unsupported("the body must be JSON"), 415, "unsupported-media-type"),
        (
            StrictBatch(3, ImageRejected("unsupported-format", "none"), param="input[3]"),
            415,
            "unsupported-format",
        ),
        (
            StrictBatch(3, ImageRejected("too-many-pixels", "9 pixels"), param="input[3]"),
            413,
            "too-many-pixels",
        ),
    ],
)
def test_clients_that_have_no_class_of_error_for_a_status_get_one_that_they_have(
    error, status, code
):
    for path in ("/v1/embeddings", "/embeddings"):
        answered, _, body = answer(path, error)
        assert (answered, body["error"]["code"]) == (400, code)
        assert body["error"]["param"] == getattr(error, "param", None)
    assert answer("/v2/embed", error)[0] == 400
    assert answer("/v2/models/m/infer", error)[0] == answer("/v1/labels", error)[0] == status
    assert answer("/v1/labels", error)[2]["status"] == status


@pytest.mark.parametrize(
    ("model", "content"),
    [
        (EmbeddingsRequest, {"model": "m", "input": "x", SECRET + " {0} %s": 1}),
        (EmbeddingsRequest, {"model": "m", "input": 7, "messages": SECRET}),
        (EmbeddingsRequest, {"model": "m", "input": "x", "encoding_format": SECRET}),
        (EmbeddingsRequest, {"model": "m", "input": "x", "modality": [SECRET]}),
        (EmbeddingsRequest, {"model": "m", "input": "x", "dimensions": SECRET}),
        (EmbeddingsRequest, {"model": "m", "input": "x", "dimensions": -1}),
        (EmbeddingsRequest, {"model": {SECRET: 1}, "input": "x"}),
        (EmbedRequest, {"model": "m", "embedding_types": []}),
        (EmbedRequest, {"model": "m", "embedding_types": [SECRET]}),
        (InferRequest, {"inputs": [{"name": SECRET, "shape": [SECRET], "datatype": "BYTES"}]}),
        (InferRequest, {"inputs": [], "id": SECRET * 100}),
        (InferRequest, {"inputs": [SECRET]}),
        (InferRequest, {"inputs": [{"name": "image", "shape": [-1], "datatype": "BYTES"}] * 2}),
    ],
)
def test_a_wrong_field_is_named_and_what_the_client_sent_is_not(model, content):
    with pytest.raises(ValidationError) as caught:
        model.model_validate(content)
    found = bad_field(caught.value.errors())
    assert SECRET not in str(found)
    assert not any(mark in str(found) for mark in ("{", "pydantic", "Input should"))
    assert str(found).count(" ") >= 2


@pytest.mark.parametrize(
    ("model", "content", "message", "param"),
    [
        (EmbeddingsRequest, {"model": "m", "dimension": 3}, "mean `dimensions`?", "dimension"),
        (EmbedRequest, {"model": "m", "image": []}, "did you mean `images`?", "image"),
        (
            SearchOptions,
            {"without": {"ids": ["a"], "weigth": 1}},
            "`weigth` in `without` of the body is not known here: did you mean `weight`?",
            "without.weigth",
        ),
        (
            InferRequest,
            {"inputs": [{"name": "image", "shapes": [1], "datatype": "BYTES"}]},
            "`shapes` in `inputs.0` of the body is not known here: did you mean `shape`?",
            "inputs.0.shapes",
        ),
        (
            InferRequest,
            {"inputs": [{"name": "i", "shape": [1], "datatype": "BYTES", "dat": 0}]},
            "`dat` in `inputs.0` of the body is not known here: did you mean `data`?",
            "inputs.0.dat",
        ),
        (InferRequest, {"inputs": [], "parameters": {"k": 3}}, "mean `top`?", "parameters.k"),
        (TextsRequest, {"text": ["a"]}, "did you mean `texts`?", "text"),
        (DeleteRequest, {}, "ids is required", "ids"),
        (SearchOptions, {"5ec2e7=": 1}, "a name in the body is not known here", None),
    ],
)
def test_an_unknown_field_is_named_with_the_one_that_was_meant(model, content, message, param):
    with pytest.raises(BadRequest) as refused:
        validate(model, content)
    assert (message in str(refused.value), refused.value.param) == (True, param), refused.value


@pytest.mark.parametrize("number", [3, 3.0])
def test_every_body_takes_an_integer_however_json_writes_it(number):
    read = [
        validate(EmbeddingsRequest, {"model": "m", "dimensions": number}).dimensions,
        validate(EmbedRequest, {"model": "m", "output_dimension": number}).output_dimension,
        validate(SearchOptions, {"top": number}).top,
        validate(LayoutItemsRequest, {"limit": number, "positions": [number]}).positions[0],
        validate(CreateRequest, {"dimension": number}).dimension,
        validate(LoadRequest, {"version": number}).version,
        validate(
            JobRequest, {"kind": "curate", "input": "i", "output": "o", "balance": number}
        ).balance,
    ]
    assert [(one, type(one)) for one in read] == [(3, int)] * 7


@pytest.mark.parametrize("number", [3.5, True, "3", [3], 1e400, float("nan")])
def test_no_body_takes_anything_else_for_an_integer(number):
    for model, content in (
        (EmbeddingsRequest, {"model": "m", "dimensions": number}),
        (EmbedRequest, {"model": "m", "output_dimension": number}),
        (SearchOptions, {"top": number}),
        (CreateRequest, {"dimension": number}),
        (JobRequest, {"kind": "curate", "input": "i", "output": "o", "balance": number}),
        (InferRequest, {"inputs": [INPUT], "parameters": {"top": number}}),
    ):
        with pytest.raises(BadRequest, match="must be an integer") as refused:
            validate(model, content)
        assert refused.value.param.rpartition(".")[2] in str(content)


@pytest.mark.parametrize(
    ("content", "message", "param"),
    [
        ({}, "model is required", "model"),
        ({"model": "m", "input": 7}, "input has an invalid value", "input"),
        ({"model": "m", "modality": ["audio"]}, "modality has an invalid value", "modality"),
        ({"model": "m", "dimensions": 0}, "dimensions must be at least 1", "dimensions"),
        (
            {"model": "m", "encoding_format": "x"},
            "encoding_format must be one of 'float' or 'base64'",
            "encoding_format",
        ),
        ({"model": "m", "inputs": 1}, "inputs is not known here", "inputs"),
        ({"model": "m", "in puts": 1}, "a field has an invalid value", None),
    ],
)
def test_a_refusal_says_which_field_and_what_is_wrong_with_it(content, message, param):
    with pytest.raises(ValidationError) as caught:
        EmbeddingsRequest.model_validate(content)
    found = bad_field(caught.value.errors())
    assert (str(found), found.param) == (message, param)


def test_what_nobody_expected_is_logged_by_place_and_not_by_text(caplog):
    def fail():
        try:
            {}[SECRET]
        except KeyError as error:
            raise RuntimeError(SECRET) from error

    try:
        fail()
    except RuntimeError as error:
        with caplog.at_level(logging.ERROR):
            status, _, problem = answer("/v1/labels", error, handle_unexpected)
    assert status == 500
    assert SECRET not in json.dumps(problem) + caplog.text
    assert "request r7 failed: RuntimeError" in caplog.text
    assert f"{__name__}:" in caplog.text
    assert "KeyError" in caplog.text
