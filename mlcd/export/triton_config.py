"""Writes the config.pbtxt of a Triton model: backend, batching, and each version's fingerprint.

docs/reference/triton.md explains each line. The format is protobuf's text format of Triton's
ModelConfig; tests parse it with tritonclient's protobuf, which an export does not need.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from mlcd.errors import ConfigInvalid

# the runtime of the graph: a provider of ONNX Runtime, or for `python` OpenVINO in Triton's python
# backend
Backend: TypeAlias = Literal["cuda", "tensorrt", "cpu", "openvino", "python"]

TritonPrecision: TypeAlias = Literal["fp32", "fp16", "bf16"]

PRECISIONS: Final[Mapping[Backend, tuple[TritonPrecision, ...]]] = {
    "cuda": ("fp32",),
    "tensorrt": ("fp32", "fp16"),
    "cpu": ("fp32",),
    "openvino": ("fp32",),
    "python": ("fp32", "bf16"),
}
_ON_GPU: Final = ("cuda", "tensorrt")
# the suffixes, after the model's name, of the model of nearest centers and of the ensemble of both
LABELS_SUFFIX: Final = "-labels"
LABELED_SUFFIX: Final = "-labeled"
# 0.5 ms is short compared with an inference, and enough to gather a batch. Under full load two
# batches of 64 and the next two wait: 256 requests. A longer queue would only add delay.
_QUEUE_DELAY_US: Final = 500
_QUEUE_TIMEOUT_US: Final = 5_000_000
_QUEUE_SIZE: Final = 256
# a folder in the server's container, where all other folders are read-only
_ENGINE_CACHE: Final = "/tmp/tensorrt"  # noqa: S108


@dataclass(frozen=True)
class TritonOptions:
    """The options of an export to Triton.

    max_batch: largest batch size. num_threads: threads of an inference on a CPU; must be None for
    GPU backends.
    """

    backend: Backend = "cuda"
    precision: TritonPrecision = "fp32"
    max_batch: int = 64
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS[self.backend]:
            supported = " or ".join(PRECISIONS[self.backend])
            raise ConfigInvalid(
                f"backend {self.backend} does not compute in {self.precision}",
                remedy=f"use {supported}",
            )
        if self.num_threads is not None and self.backend in _ON_GPU:
            raise ConfigInvalid(
                f"--threads is for backends on a CPU, got backend {self.backend}",
                remedy="omit --threads",
            )
        if self.max_batch < 1 or (self.num_threads is not None and self.num_threads < 1):
            raise ConfigInvalid(
                "the largest batch and the number of threads must be at least 1, got"
                f" {self.max_batch} and {self.num_threads}"
            )

    @property
    def on_gpu(self) -> bool:
        return self.backend in _ON_GPU


@dataclass(frozen=True)
class GraphInput:
    """The input of a graph.

    dims: shape without the batch; -1 is a dynamic axis of length 1 to `longest`. warmup: content of
    the input before the first request.
    """

    name: str
    kind: Literal["TYPE_UINT8", "TYPE_INT64", "TYPE_FP32"]
    dims: tuple[int, ...]
    warmup: Literal["random_data", "zero_data"]
    longest: int = 1

    def shape(self, free: int) -> list[int]:
        """Returns the shape without the batch, with `free` as the length of a dynamic axis."""
        return [free if size < 0 else size for size in self.dims]


def image_input(size: int) -> GraphInput:
    return GraphInput("image_u8", "TYPE_UINT8", (3, size, size), "random_data")


def text_input(context_length: int) -> GraphInput:
    # random numbers are not valid token ids
    return GraphInput("ids", "TYPE_INT64", (-1,), "zero_data", context_length)


def write_config(
    name: str,
    options: TritonOptions,
    *,
    graph_input: GraphInput,
    dimension: int,
    versions: Mapping[int, Mapping[str, str]],
    num_threads: int,
) -> str:
    """Returns the config.pbtxt for all `versions`, with the options of the newest version.

    versions: parameters of each version for the gateway, by name. num_threads: threads on a CPU.
    """
    kind = "KIND_GPU" if options.on_gpu else "KIND_CPU"
    version_list = ", ".join(map(str, sorted(versions)))
    blocks = [
        f"name: {_quote(name)}",
        f"backend: {_quote('python' if options.backend == 'python' else 'onnxruntime')}",
        f"max_batch_size: {options.max_batch}",
        _input(graph_input),
        f'output [ {{ name: "embedding" data_type: TYPE_FP32 dims: [ {dimension} ] }} ]',
        f"instance_group [ {{ count: 1 kind: {kind} }} ]",
        _batching(),
        _warmup(options.max_batch, graph_input),
        f"version_policy {{ specific {{ versions: [ {version_list} ] }} }}",
        *_execution(options, graph_input, num_threads),
        _parameter("precision", options.precision),
    ]
    for number, facts in sorted(versions.items()):
        blocks += [_parameter(f"{name}.{number}", value) for name, value in facts.items()]
    return "\n".join(blocks) + "\n"


def write_labels(
    name: str,
    options: TritonOptions,
    *,
    dimension: int,
    top: int,
    number: int,
    facts: Mapping[str, str],
) -> str:
    """Returns the config.pbtxt of a model from embeddings to their `top` nearest centers.

    number: number of the version. facts: its parameters for the gateway, by name.
    """
    graph_input = GraphInput("embedding", "TYPE_FP32", (dimension,), "zero_data")
    blocks = [
        f"name: {_quote(name)}",
        'backend: "python"',
        f"max_batch_size: {options.max_batch}",
        _input(graph_input),
        _labels(top),
        f"instance_group [ {{ count: 1 kind: {'KIND_GPU' if options.on_gpu else 'KIND_CPU'} }} ]",
        _batching(),
        _warmup(options.max_batch, graph_input),
        *_version_lines(number, facts),
    ]
    return "\n".join(blocks) + "\n"


def write_ensemble(
    name: str,
    options: TritonOptions,
    *,
    graph_input: GraphInput,
    dimension: int,
    top: int,
    number: int,
    facts: Mapping[str, str],
) -> str:
    """Returns the config.pbtxt of the ensemble of the model `name` and its labels."""
    blocks = [
        f"name: {_quote(name + LABELED_SUFFIX)}",
        'platform: "ensemble"',
        f"max_batch_size: {options.max_batch}",
        _input(graph_input),
        f'output [ {{ name: "embedding" data_type: TYPE_FP32 dims: [ {dimension} ] }} ]',
        _labels(top),
        "ensemble_scheduling {",
        _step(name, number, graph_input.name, "embedding"),
        _step(name + LABELS_SUFFIX, number, "embedding", "ids", "similarity"),
        "}",
        *_version_lines(number, facts),
    ]
    return "\n".join(blocks) + "\n"


def _input(graph_input: GraphInput) -> str:
    dims = ", ".join(map(str, graph_input.dims))
    return (
        f'input [ {{ name: "{graph_input.name}" data_type: {graph_input.kind} dims: [ {dims} ] }} ]'
    )


def _labels(top: int) -> str:
    return f"""output [
  {{ name: "ids" data_type: TYPE_INT32 dims: [ {top} ] }},
  {{ name: "similarity" data_type: TYPE_FP64 dims: [ {top} ] }}
]"""


def _step(name: str, number: int, input_name: str, *output_names: str) -> str:
    maps = [f'input_map {{ key: "{input_name}" value: "{input_name}" }}']
    maps += [f'output_map {{ key: "{output}" value: "{output}" }}' for output in output_names]
    lines = "\n    ".join([f"model_name: {_quote(name)} model_version: {number}", *maps])
    return f"  step [ {{\n    {lines}\n  }} ]"


def _version_lines(number: int, facts: Mapping[str, str]) -> list[str]:
    policy = f"version_policy {{ specific {{ versions: [ {number} ] }} }}"
    return [policy, *(_parameter(f"{key}.{number}", value) for key, value in facts.items())]


def _batching() -> str:
    return f"""dynamic_batching {{
  max_queue_delay_microseconds: {_QUEUE_DELAY_US}
  default_queue_policy {{
    timeout_action: REJECT
    default_timeout_microseconds: {_QUEUE_TIMEOUT_US}
    allow_timeout_override: true
    max_queue_size: {_QUEUE_SIZE}
  }}
}}"""


def _warmup(max_batch: int, tensor: GraphInput) -> str:
    dims = ", ".join(map(str, tensor.shape(tensor.longest)))
    batches = ",\n".join(
        f"""  {{ name: "batch_{batch}" batch_size: {batch} inputs {{ key: "{tensor.name}" value {{
      data_type: {tensor.kind} dims: [ {dims} ] {tensor.warmup}: true }} }} }}"""
        for batch in sorted({1, max_batch})
    )
    return f"model_warmup [\n{batches}\n]"


def _execution(options: TritonOptions, graph_input: GraphInput, num_threads: int) -> list[str]:
    """Returns the backend's lines."""
    if options.backend == "tensorrt":
        return [_tensorrt(options, graph_input)]
    if options.backend == "cpu":
        return [_parameter("intra_op_thread_count", str(num_threads))]
    if options.backend == "openvino":
        accelerator = (
            "optimization { execution_accelerators "
            '{ cpu_execution_accelerator: [ { name: "openvino" } ] } }'
        )
        return [accelerator, _parameter("intra_op_thread_count", str(num_threads))]
    if options.backend == "python":
        return [_parameter("num_threads", str(num_threads))]
    # ONNX Runtime's arena doubles by default: with varying batch sizes it would grow far beyond the
    # memory of the largest batch.
    return [_parameter("arena_extend_strategy", "1")]


def _tensorrt(options: TritonOptions, graph_input: GraphInput) -> str:
    """Returns TensorRT's settings, with one profile for all batch sizes and lengths: otherwise each
    new shape would build another engine, which takes minutes.
    """
    half = max(1, options.max_batch // 2)
    shapes = {
        "min": [1, *graph_input.shape(1)],
        "opt": [half, *graph_input.shape(max(1, graph_input.longest // 2))],
        "max": [options.max_batch, *graph_input.shape(graph_input.longest)],
    }
    settings = {
        "precision_mode": options.precision.upper(),
        # squares of activations overflow float16
        "trt_layer_norm_fp32_fallback": "true",
        "trt_engine_cache_enable": "true",
        "trt_engine_cache_path": _ENGINE_CACHE,
        **{
            f"trt_profile_{end}_shapes": f"{graph_input.name}:{'x'.join(map(str, shape))}"
            for end, shape in shapes.items()
        },
    }
    lines = "\n".join(
        f"    parameters {{ key: {_quote(key)} value: {_quote(settings[key])} }}"
        for key in settings
    )
    return f"""optimization {{ execution_accelerators {{ gpu_execution_accelerator: [ {{
    name: "tensorrt"
{lines}
}} ] }} }}"""


def _parameter(key: str, value: str) -> str:
    return f"parameters {{ key: {_quote(key)} value: {{ string_value: {_quote(value)} }} }}"


def _quote(text: str) -> str:
    """Quotes ASCII text with JSON's escapes, which protobuf's text format shares."""
    return json.dumps(text)
