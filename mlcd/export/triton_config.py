"""The config.pbtxt of a Triton model: its backend, its batching, and the fingerprint of each
version.

docs/reference/triton.md explains each line. The text is protobuf's text format of Triton's
ModelConfig; the tests parse it with the protobuf of tritonclient, which an export does not need.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from mlcd.errors import ConfigInvalid
from mlcd.images.transform import PreprocessSpec
from mlcd.types import Fingerprint

# the runtime of the graph: ONNX Runtime's provider of that name, or OpenVINO in Triton's python
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
# 0.5 ms is little beside an inference and enough to gather a batch. Under full load two batches of
# 64 and their successors wait: 256. A longer queue would only add delay.
_QUEUE_DELAY_US: Final = 500
_QUEUE_TIMEOUT_US: Final = 5_000_000
_QUEUE_SIZE: Final = 256
# a folder inside the server's container, whose other folders are read-only
_ENGINE_CACHE: Final = "/tmp/tensorrt"  # noqa: S108


@dataclass(frozen=True)
class TritonOptions:
    """The options of an export to Triton.

    backend, precision: as above. num_threads: those of an inference on a CPU; the backends on a GPU
    take none.
    """

    backend: Backend = "cuda"
    precision: TritonPrecision = "fp32"
    max_batch: int = 64
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS[self.backend]:
            possible = " or ".join(PRECISIONS[self.backend])
            raise ConfigInvalid(
                f"backend {self.backend} does not compute in {self.precision}",
                remedy=f"use {possible}",
            )
        if self.num_threads is not None and self.backend in _ON_GPU:
            raise ConfigInvalid(
                f"backend {self.backend} has no threads to set", remedy="leave --threads out"
            )
        if self.max_batch < 1 or (self.num_threads is not None and self.num_threads < 1):
            raise ConfigInvalid("the largest batch and the number of threads must be at least 1")


@dataclass(frozen=True)
class Version:
    """One version of the model, as config.pbtxt describes it to the gateway."""

    fingerprint: Fingerprint
    preprocess: PreprocessSpec


def write_config(
    name: str,
    options: TritonOptions,
    *,
    dimension: int,
    versions: Mapping[int, Version],
    num_threads: int,
) -> str:
    """Returns the config.pbtxt for all `versions`; the options are those of the newest.
    num_threads: on a CPU.
    """
    size = versions[max(versions)].preprocess.crop
    kind = "KIND_GPU" if options.backend in _ON_GPU else "KIND_CPU"
    numbers = ", ".join(map(str, sorted(versions)))
    blocks = [
        f"name: {_quoted(name)}",
        f"backend: {_quoted('python' if options.backend == 'python' else 'onnxruntime')}",
        f"max_batch_size: {options.max_batch}",
        f'input [ {{ name: "image_u8" data_type: TYPE_UINT8 dims: [ 3, {size}, {size} ] }} ]',
        f'output [ {{ name: "embedding" data_type: TYPE_FP32 dims: [ {dimension} ] }} ]',
        f"instance_group [ {{ count: 1 kind: {kind} }} ]",
        _batching(),
        _warmup(options.max_batch, size),
        f"version_policy {{ specific {{ versions: [ {numbers} ] }} }}",
        *_execution(options, size, num_threads),
        _parameter("precision", options.precision),
    ]
    for number, version in sorted(versions.items()):
        blocks.append(_parameter(f"fingerprint.{number}", version.fingerprint))
        blocks.append(
            _parameter(f"preprocess.{number}", json.dumps(json.loads(version.preprocess.to_json())))
        )
    return "\n".join(blocks) + "\n"


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


def _warmup(max_batch: int, size: int) -> str:
    batches = ",\n".join(
        f"""  {{ name: "batch_{batch}" batch_size: {batch} inputs {{ key: "image_u8" value {{
      data_type: TYPE_UINT8 dims: [ 3, {size}, {size} ] random_data: true }} }} }}"""
        for batch in sorted({1, max_batch})
    )
    return f"model_warmup [\n{batches}\n]"


def _execution(options: TritonOptions, size: int, num_threads: int) -> list[str]:
    """Returns the lines of the chosen backend."""
    if options.backend == "tensorrt":
        return [_tensorrt(options, size)]
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
    # ONNX Runtime's arena doubles by default: with batches of every size it ends far above what one
    # of them takes.
    return [_parameter("arena_extend_strategy", "1")]


def _tensorrt(options: TritonOptions, size: int) -> str:
    """Returns one profile over all batch sizes; without it a new size would build another engine,
    which takes minutes.
    """
    shapes = {"min": 1, "opt": max(1, options.max_batch // 2), "max": options.max_batch}
    settings = {
        "precision_mode": options.precision.upper(),
        # squares of activations overflow float16
        "trt_layer_norm_fp32_fallback": "true",
        "trt_engine_cache_enable": "true",
        "trt_engine_cache_path": _ENGINE_CACHE,
        **{
            f"trt_profile_{end}_shapes": f"image_u8:{batch}x3x{size}x{size}"
            for end, batch in shapes.items()
        },
    }
    lines = "\n".join(
        f"    parameters {{ key: {_quoted(key)} value: {_quoted(settings[key])} }}"
        for key in settings
    )
    return f"""optimization {{ execution_accelerators {{ gpu_execution_accelerator: [ {{
    name: "tensorrt"
{lines}
}} ] }} }}"""


def _parameter(key: str, value: str) -> str:
    return f"parameters {{ key: {_quoted(key)} value: {{ string_value: {_quoted(value)} }} }}"


def _quoted(text: str) -> str:
    """Quotes ASCII text by JSON's escapes, which are protobuf's too."""
    return json.dumps(text)
