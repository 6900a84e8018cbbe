"""The OpenAPI document says all that a route takes and gives."""

import json
import re

import pytest
from openapi_spec_validator import validate

from mlcd.service.http.app import create_app
from mlcd.service.http.dialect import dialect_of

APP = create_app(None)
POSTS = {
    *[
        "/v1/embeddings",
        "/embeddings",
        "/v2/embed",
        "/v2/models/{model}/infer",
        "/v1/images/embed",
        "/v1/texts/embed",
        "/v2/models/{model}/versions/{version}/infer",
        "/v1/classify",
        "/v1/labels",
        "/v1/exploration",
        "/v1/jobs",
        "/v1/collections/{name}/items",
        "/v1/collections/{name}/search",
        "/v1/collections/{name}/duplicates",
        "/v1/collections/{name}/delete",
        "/v1/collections/{name}/layout/items",
        "/v1/models/{name}/load",
        "/v1/jobs/{job_id}/retry",
        "/v1/files",
        "/v1/uploads",
        "/v1/uploads/{upload_id}/parts",
        "/v1/uploads/{upload_id}/complete",
        "/v1/uploads/{upload_id}/cancel",
        "/v1/batches",
        "/v1/batches/{batch_id}/cancel",
        "/v1/webhook_endpoints",
        "/v1/webhook_endpoints/{webhook_id}",
        "/v1/webhook_endpoints/{webhook_id}/rotate_secret",
        "/v1/webhook_endpoints/{webhook_id}/test",
    ]
}
GETS = {"/v1/info", "/v1/models", "/v1/models/{model}", "/v1/centers/{center}", "/v2"}
GETS |= {"/v2/health/ready"}


@pytest.fixture(scope="module")
def document():
    return APP.openapi()


@pytest.fixture(scope="module")
def operations(document):
    return {
        (method, path): operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
    }


def test_it_is_valid_openapi(document):
    validate(document)
    assert json.loads(json.dumps(document)) == document


def test_every_route_of_the_contract_is_in_it(operations):
    posts, gets = (
        {path for method, path in operations if method == verb} for verb in ("post", "get")
    )
    assert posts == POSTS
    assert gets >= GETS


def test_every_route_says_what_it_takes_and_every_status_it_can_give(operations):
    for (method, path), operation in operations.items():
        statuses = set(operation["responses"])
        assert {"200", "500"} <= statuses
        if method == "post" and "requestBody" in operation:
            assert {"400", "422", "429", "503", "504"} <= statuses, path
            # The clients of the others have no class of error for these.
            has_classes = dialect_of(APP, path).schema.__name__ in ("OpenAIError", "CohereError")
            assert statuses & {"413", "415"} == (set() if has_classes else {"413", "415"}), path
            assert all(
                content["schema"] for content in operation["requestBody"]["content"].values()
            )
        if "{" in path:
            assert {"400", "404"} <= statuses, path
        content = operation["responses"]["200"].get("content")
        assert (
            content is None
            if path == "/metrics"
            else all(kind["schema"] for kind in content.values())
        ), path
        for status, response in operation["responses"].items():
            assert "X-Request-Id" in response["headers"]
            assert ("Retry-After" in response["headers"]) == (status in ("429", "503"))


def test_routes_are_in_the_order_of_their_use_each_with_a_sentence(document, operations):
    tags = [operation["tags"][0] for operation in operations.values()]
    order = [tag["name"] for tag in document["tags"]]
    assert list(dict.fromkeys(tags)) == order
    assert order[:4] == ["embed", "labels", "search", "collections"]
    assert order[-2:] == ["kserve", "health"]
    for operation in operations.values():
        assert operation["summary"].endswith((".", ":")), operation["summary"]
        assert " " in operation["summary"]


def test_every_route_of_ours_has_an_example_that_fits_it(operations):
    without = {
        path
        for (method, path), operation in operations.items()
        if operation["tags"][0] not in ("kserve", "health", "info", "openai")
        and "curl -s" not in operation["description"]
        and "layout" not in path
    }
    assert without == {"/v1/exploration/pictures/{id}"}
    for (method, path), operation in operations.items():
        shown = re.search(r"curl -s(.*)'http://127.0.0.1:8000([^'?]*)", operation["description"])
        if shown is None:
            continue
        assert re.fullmatch(re.sub(r"\{[a-z_]+\}", "[^/]+", path), shown[2])
        body = re.search(r"-d '(.*?)'", shown[1])
        verb = re.search(r"-X ([A-Z]+)", shown[1])
        sends = body or "-F" in shown[1]
        assert method.upper() == (verb[1] if verb else "POST" if sends else "GET")
        if body and "…" not in body[1]:
            json.loads(body[1])


def test_errors_are_in_the_dialect_of_the_route(operations):
    for (_, path), operation in operations.items():
        dialect = dialect_of(APP, path)
        schema = {"$ref": f"#/components/schemas/{dialect.schema.__name__}"}
        for status, response in operation["responses"].items():
            if status >= "400" and not path.endswith("/ready"):
                expected = {dialect.media_type: {"schema": schema}}
                assert response["content"] == expected, (path, status)


def test_no_schema_of_the_framework_is_left(document):
    assert "HTTPValidationError" not in json.dumps(document)


def test_examples_are_valid_requests(document):
    from mlcd.service.http.dialects.cohere import EmbedRequest
    from mlcd.service.http.dialects.kserve import InferRequest
    from mlcd.service.http.dialects.openai import EmbeddingsRequest

    for model in (EmbeddingsRequest, EmbedRequest, InferRequest):
        examples = document["components"]["schemas"][model.__name__]["examples"]
        assert examples
        for example in examples:
            model.model_validate(example)


def test_fields_of_which_one_is_given_are_alternatives(document):
    """The routes take them so: a null is a field that is not given."""
    from jsonschema import Draft202012Validator

    schemas = document["components"]["schemas"]
    cases = [
        ("EmbeddingsRequest", {"model": "m"}, {"input": "x"}, {"messages": []}),
        ("EmbedRequest", {"model": "m"}, {"images": []}, {"inputs": []}),
        ("QueryRequest", {}, {"images": [1]}, {"embeddings": [[1.0]]}),
        ("SearchRequest", {}, {"id": "x"}, {"images": []}),
    ]
    for name, base, one, other in cases:
        validator = Draft202012Validator({**schemas[name], "components": document["components"]})
        nulls = dict.fromkeys(other)
        assert validator.is_valid(base | one)
        assert validator.is_valid(base | other)
        assert validator.is_valid(base | one | nulls)
        assert not validator.is_valid(base)
        assert not validator.is_valid(base | one | other)
        assert not validator.is_valid(base | dict.fromkeys(one))
