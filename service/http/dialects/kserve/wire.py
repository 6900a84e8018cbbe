"""Wire models of KServe's Open Inference Protocol (v2) over HTTP."""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from service.http.dialect import Dialect, Refusal
from service.http.dialects.schema import EXAMPLE_IMAGE

Datatype = Literal["BYTES", "UINT8", "FP32", "INT32"]


class LiveAnswer(BaseModel):
    """Whether the process answers."""

    live: bool


class ReadyAnswer(BaseModel):
    """Whether it can serve."""

    ready: bool


class ModelReadyAnswer(ReadyAnswer):
    """Whether this model can serve."""

    name: str


class ServerMetadata(BaseModel):
    """The server and what it speaks beyond the protocol."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(BaseModel):
    """-1: any size."""

    name: str
    datatype: Datatype
    shape: list[int]


class ModelMetadata(BaseModel):
    """Inputs are alternatives: a request carries one of them."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: dict[str, str]


class ConfiguredTensor(BaseModel):
    """A tensor without the dimension of the batch. optional: another input may be given in its place."""

    name: str
    data_type: Literal["TYPE_STRING", "TYPE_UINT8", "TYPE_FP32", "TYPE_INT32"]
    dims: list[int]
    optional: bool | None = None


class ModelConfig(BaseModel):
    """Triton's ModelConfig, of which this has what holds here. max_batch_size: images in one request."""

    name: str
    platform: str
    version_policy: dict[str, dict[str, list[int]]]
    max_batch_size: int
    input: list[ConfiguredTensor]
    output: list[ConfiguredTensor]
    dynamic_batching: dict[str, Any]
    parameters: dict[str, dict[str, str]]


class IndexRequest(BaseModel):
    """ready: only a model that can serve."""

    model_config = ConfigDict(extra="forbid")

    ready: StrictBool = False


class ModelIndex(BaseModel):
    """reason: where it is not ready."""

    name: str
    version: str
    state: Literal["READY", "UNAVAILABLE"]
    reason: str | None = None


class Duration(BaseModel):
    """How often it was measured, and all of it together; a count of 0 is what is not measured."""

    count: int
    ns: int


class InferenceStatistics(BaseModel):
    """Statistics of requests. compute_input: decoding; compute_infer: of the batches that their images rode in."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration


class VersionStatistics(BaseModel):
    """inference_count: images, execution_count: batches that the engine computed, the server's own trials included."""

    name: str
    version: str
    last_inference: int
    """Milliseconds since 1970; 0: there was none."""
    inference_count: int
    execution_count: int
    inference_stats: InferenceStatistics
    batch_stats: list[Any]


class ModelStatistics(BaseModel):
    """Triton's statistics of the served model."""

    model_stats: list[VersionStatistics]


class InputParameters(BaseModel):
    """binary_data_size: bytes of this tensor after the JSON part."""

    model_config = ConfigDict(extra="forbid")

    binary_data_size: Annotated[StrictInt, Field(ge=0)] | None = None


class InputTensor(BaseModel):
    """`image`: BYTES [n], encoded images, in JSON base64 or URLs; `image_u8`: UINT8 [n, 3, S, S], prepared pixels."""

    model_config = ConfigDict(extra="forbid")

    name: str
    shape: Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(max_length=16)]
    datatype: str
    parameters: InputParameters = InputParameters()
    data: Any = None


class OutputParameters(BaseModel):
    """binary_data: this output after the JSON part."""

    model_config = ConfigDict(extra="forbid")

    binary_data: StrictBool | None = None


class RequestedOutput(BaseModel):
    """embedding, label_ids or label_scores."""

    model_config = ConfigDict(extra="forbid")

    name: str
    parameters: OutputParameters = OutputParameters()


class InferParameters(BaseModel):
    """binary_data_output: every output after the JSON part. top: labels per image."""

    model_config = ConfigDict(extra="forbid")

    binary_data_output: StrictBool = False
    top: Annotated[StrictInt, Field(ge=1)] = 8
    timeout: Annotated[StrictInt, Field(ge=0)] = 0
    """Microseconds until the answer is of no use: 504 then. 0, or more than the server allows: its own deadline."""
    priority: Annotated[StrictInt, Field(ge=0)] = 0
    """Not used, as by a model of Triton's without priority levels."""
    sequence_id: Annotated[StrictInt, Field(ge=0)] | Annotated[StrictStr, Field(max_length=128)] = 0
    """Not used, nor its start and end, as by a model of Triton's without state: every image is on its own."""
    sequence_start: StrictBool = False
    sequence_end: StrictBool = False


class InferRequest(BaseModel):
    """One input; without `outputs` every output comes back."""

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
    """`data` row by row, or parameters.binary_data_size bytes after the JSON part."""

    name: str
    shape: list[int]
    datatype: Datatype
    data: list[float] | list[int] | None = None
    parameters: dict[str, int] | None = None


class InferResponse(BaseModel):
    """embedding FP32 [n, D]; with centers also label_ids INT32 and label_scores FP32 [n, L], best first."""

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
