"""The wire models of KServe's Open Inference Protocol (v2) over HTTP."""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from mlcd.wire.shapes import EXAMPLE_IMAGE
from service.http.dialect import Dialect, Refusal

Datatype = Literal["BYTES", "UINT8", "FP32", "INT32"]


class LiveAnswer(BaseModel):
    """The answer of a process that lives."""

    live: bool


class ReadyAnswer(BaseModel):
    """The answer whether the server can serve."""

    ready: bool


class ModelReadyAnswer(ReadyAnswer):
    """The answer whether this model can serve."""

    name: str


class ServerMetadata(BaseModel):
    """The server and the extensions that it has beyond the protocol."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(BaseModel):
    """A tensor of the model; -1 in its shape stands for any size."""

    name: str
    datatype: Datatype
    shape: list[int]


class ModelMetadata(BaseModel):
    """The model's tensors; its inputs are alternatives, of which a request carries one."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: dict[str, str]


class ConfiguredTensor(BaseModel):
    """A tensor without the dimension of the batch.

    optional: another input may be given in its place.
    """

    name: str
    data_type: Literal["TYPE_STRING", "TYPE_UINT8", "TYPE_FP32", "TYPE_INT32"]
    dims: list[int]
    optional: bool | None = None


class ModelConfig(BaseModel):
    """The fields of Triton's ModelConfig that apply here. max_batch_size: images in one request."""

    name: str
    platform: str
    version_policy: dict[str, dict[str, list[int]]]
    max_batch_size: int
    input: list[ConfiguredTensor]
    output: list[ConfiguredTensor]
    dynamic_batching: dict[str, Any]
    parameters: dict[str, dict[str, str]]


class IndexRequest(BaseModel):
    """The request for the index. ready: list only a model that can serve."""

    model_config = ConfigDict(extra="forbid")

    ready: StrictBool = False


class ModelIndex(BaseModel):
    """An entry of the index. reason: why the model is not ready."""

    name: str
    version: str
    state: Literal["READY", "UNAVAILABLE"]
    reason: str | None = None


class Duration(BaseModel):
    """A number of measurements and their sum; a count of 0 means that nothing is measured."""

    count: int
    ns: int


class InferenceStatistics(BaseModel):
    """The statistics of requests.

    compute_input: decoding. compute_infer: the inference of the batches with the requests' images.
    """

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration


class VersionStatistics(BaseModel):
    """The statistics of the served version.

    inference_count: images. execution_count: batches that the engine computed, with the server's
    own trials.
    """

    name: str
    version: str
    last_inference: int  # milliseconds since 1970; 0: there was none
    inference_count: int
    execution_count: int
    inference_stats: InferenceStatistics
    batch_stats: list[Any]


class ModelStatistics(BaseModel):
    """The statistics of the served model in Triton's format."""

    model_stats: list[VersionStatistics]


class InputParameters(BaseModel):
    """Parameters of an input. binary_data_size: bytes of this tensor after the JSON part."""

    model_config = ConfigDict(extra="forbid")

    binary_data_size: Annotated[StrictInt, Field(ge=0)] | None = None


class InputTensor(BaseModel):
    """An input tensor.

    `image`: BYTES [n], encoded images, in JSON base64 or URLs. `image_u8`: UINT8 [n, 3, S, S],
    prepared pixels. `text`: BYTES [n], texts in UTF-8, in JSON strings, for models that take texts.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    shape: Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(max_length=16)]
    datatype: str
    parameters: InputParameters = InputParameters()
    data: Any = None


class OutputParameters(BaseModel):
    """Parameters of an output. binary_data: send this output after the JSON part."""

    model_config = ConfigDict(extra="forbid")

    binary_data: StrictBool | None = None


class RequestedOutput(BaseModel):
    """An output to return: embedding, label_ids or label_scores."""

    model_config = ConfigDict(extra="forbid")

    name: str
    parameters: OutputParameters = OutputParameters()


class InferParameters(BaseModel):
    """Parameters of a request.

    binary_data_output: send every output after the JSON part. top: labels per image.
    """

    model_config = ConfigDict(extra="forbid")

    binary_data_output: StrictBool = False
    top: Annotated[StrictInt, Field(ge=1)] = 8
    # Microseconds until the client needs no answer any more, which then is 504. With 0, or more
    # than the server's own deadline, the latter holds.
    timeout: Annotated[StrictInt, Field(ge=0)] = 0
    # Not used: a Triton model without priority levels ignores it, too.
    priority: Annotated[StrictInt, Field(ge=0)] = 0
    # Sequences are not used: a Triton model without state ignores them, too.
    sequence_id: Annotated[StrictInt, Field(ge=0)] | Annotated[StrictStr, Field(max_length=128)] = 0
    sequence_start: StrictBool = False
    sequence_end: StrictBool = False


class InferRequest(BaseModel):
    """A request with one input; without `outputs` every output comes back."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "id": "1",
                    "inputs": [
                        {
                            "name": "image",
                            "shape": [1],
                            "datatype": "BYTES",
                            "data": [EXAMPLE_IMAGE.partition(",")[2]],
                        }
                    ],
                    "outputs": [{"name": "embedding"}],
                }
            ]
        },
    )

    id: Annotated[str, Field(max_length=256)] | None = None
    parameters: InferParameters = InferParameters()
    inputs: Annotated[list[InputTensor], Field(min_length=1, max_length=1)]
    outputs: Annotated[list[RequestedOutput], Field(max_length=64)] | None = None


class OutputTensor(BaseModel):
    """An output: `data` row by row, or parameters.binary_data_size bytes after the JSON part."""

    name: str
    shape: list[int]
    datatype: Datatype
    data: list[float] | list[int] | None = None
    parameters: dict[str, int] | None = None


class InferResponse(BaseModel):
    """The outputs: embedding FP32 [n, D], and labels where there are centers.

    Labels are label_ids INT32 and label_scores FP32 [n, L], best first.
    """

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]


class KServeError(BaseModel):
    """The protocol's shape of a refusal."""

    error: str


def _refusal(refusal: Refusal) -> dict[str, Any]:
    return {"error": refusal.detail}


DIALECT: Final = Dialect(("/v2",), "application/json", KServeError, _refusal)
