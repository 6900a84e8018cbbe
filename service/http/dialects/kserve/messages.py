"""The wire models of KServe's Open Inference Protocol (v2) over HTTP."""

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from mlcd.wire.shapes import EXAMPLE_IMAGE
from service.http.dialect import Dialect

ONE_IMAGE: Final[dict[str, Any]] = {"name": "image", "shape": [1], "datatype": "BYTES"}
_EXAMPLE: Final[dict[str, Any]] = {
    "id": "1",
    "inputs": [{**ONE_IMAGE, "data": [EXAMPLE_IMAGE.partition(",")[2]]}],
    "outputs": [{"name": "embedding"}],
}


class _Given(BaseModel):
    model_config = ConfigDict(extra="forbid")


class InputParameters(_Given):
    """Parameters of an input. binary_data_size: bytes of this tensor after the JSON part."""

    binary_data_size: Annotated[StrictInt, Field(ge=0)] | None = None


class InputTensor(_Given):
    """An input tensor.

    `image`: BYTES [n], encoded images, in JSON base64 or URLs. `image_u8`: UINT8 [n, 3, S, S],
    prepared pixels. `text`: BYTES [n], texts in UTF-8, in JSON strings, for models that take texts.
    """

    name: str
    shape: Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(max_length=16)]
    datatype: str
    parameters: InputParameters = InputParameters()
    data: Any = None


class OutputParameters(_Given):
    """Parameters of an output. binary_data: send this output after the JSON part."""

    binary_data: StrictBool | None = None


class RequestedOutput(_Given):
    """An output to return: embedding, label_ids or label_scores."""

    name: str
    parameters: OutputParameters = OutputParameters()


class InferParameters(_Given):
    """Parameters of a request.

    binary_data_output: send every output after the JSON part. top: labels per image.
    """

    binary_data_output: StrictBool = False
    top: Annotated[StrictInt, Field(ge=1)] = 8


class InferRequest(_Given):
    """A request with one input; without `outputs` every output comes back."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    id: Annotated[str, Field(max_length=256)] | None = None
    parameters: InferParameters = InferParameters()
    inputs: Annotated[list[InputTensor], Field(min_length=1, max_length=1)]
    outputs: Annotated[list[RequestedOutput], Field(max_length=64)] | None = None


class KServeError(BaseModel):
    """The protocol's shape of a refusal."""

    error: str


DIALECT: Final = Dialect(
    ("/v2",), "application/json", KServeError, lambda refusal: {"error": refusal.detail}
)
