"""The engine OpenVINO on the CPU, for our exported models and any ONNX image encoder with a JSON
file beside it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino.preprocess import PrePostProcessor
from pydantic import BaseModel, ConfigDict, ValidationError

from mlcd.artifacts.manifest import Artifact, open_artifact, verify_file
from mlcd.cores import available_cores, cpu_features
from mlcd.encoders.encoder import Precision
from mlcd.encoders.local_text import LocalTextEncoder, TextPart
from mlcd.encoders.options import DEFAULTS, EncoderOptions
from mlcd.encoders.unit_rows import encode_in_parts
from mlcd.errors import ArtifactInvalid, ConfigInvalid, NotFound, Unavailable
from mlcd.images.decode import ExifPolicy
from mlcd.images.transform import PreprocessSpec
from mlcd.models.text_part import GRAPH
from mlcd.types import Embeddings, Fingerprint, ImageBatch, model_name

# The int8 graph of a model artifact, beside the fp32 graph: OpenVINO's own format, in two files.
INT8_GRAPH: Final = "int8.xml"
INT8_WEIGHTS: Final = "int8.bin"
ONNX: Final = "model.onnx"
_PREPROCESSING: Final = "preprocess.json"
_REVISION_DIGITS: Final = 12  # hex digits of an int8 graph's digest in `precision`
# for int8, the hint applies to the layers that its graph leaves in floating point
_HINTS: Final[dict[Precision, Any]] = {
    "fp32": ov.Type.f32,
    "bf16": ov.Type.bf16,
    "int8": ov.Type.f32,
}


class _Card(BaseModel):
    """The JSON beside an external ONNX encoder: its input, its preprocessing, and the output with
    the embedding.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str | None = None
    input: str
    output: str
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    resize_shortest: int
    crop: int
    interpolation: Literal["bicubic"] = "bicubic"
    exif: ExifPolicy = "apply"
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    dimension: int

    def preprocess(self) -> PreprocessSpec:
        names = ("resize_shortest", "crop", "interpolation", "exif", "mean", "std")
        return PreprocessSpec.from_dict({name: getattr(self, name) for name in names})


class _Compiled:
    """One compiled model with dynamic shapes, which computes one batch at a time.

    Separate models per batch size were measured to be slower (docs/explanation/engines.md).
    """

    def __init__(self, model: ov.Model, precision: Precision, num_threads: int) -> None:
        """num_threads: number of threads; 0 means one per core that the process may use."""
        check_precision(precision)
        threads = num_threads or available_cores()
        config = {
            "INFERENCE_PRECISION_HINT": _HINTS[precision],
            # one stream on all threads, because the service batches requests itself
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
            # Pinning always starts at the first core: two processes with a few threads each would
            # share the same cores.
            "ENABLE_CPU_PINNING": threads >= available_cores(),
        }
        with _translate_errors():
            self.request: Any = core().compile_model(model, "CPU", config).create_infer_request()
        self._lock = threading.Lock()

    def run(self, batch: NDArray[Any]) -> NDArray[np.float32]:
        with self._lock, _translate_errors():
            if self.request is None:
                raise Unavailable("the encoder is closed", remedy="open the model again")
            # A copy, because the next inference overwrites the request's output.
            rows: NDArray[np.float32] = self.request.infer([batch], share_inputs=True)[0].copy()
            return rows

    def close(self) -> None:
        with self._lock:
            self.request = None


class OpenVinoEncoder:
    """The `Encoder` protocol over one compiled OpenVINO model of dynamic batch."""

    engine = "openvino"

    def __init__(
        self,
        model: ov.Model,
        *,
        name: str,
        fingerprint: Fingerprint,
        preprocess: PreprocessSpec,
        precision: Precision = "fp32",
        revision: str = "",
        num_threads: int = 0,
    ) -> None:
        """revision: suffix of `precision` that distinguishes graphs of one model. num_threads:
        number of threads; 0 means one per core that the process may use.
        """
        self.name, self.fingerprint, self.preprocess = name, fingerprint, preprocess
        self.precision: str = f"{precision}-{revision}" if revision else precision
        self.dimension = int(model.output(0).partial_shape[1].get_length())
        self._compiled = _Compiled(model, precision, num_threads)

    def encode(self, images: ImageBatch) -> Embeddings:
        return encode_in_parts(
            images, self._compiled.run, crop=self.preprocess.crop, dimension=self.dimension
        )

    def close(self) -> None:
        self._compiled.close()


@cache
def core() -> ov.Core:
    """Returns this process's only Core, which is never destroyed.

    A Core's CPU plugin replaces the stack of signal handlers and restores the previous stack at its
    end. If two Cores do not end in reverse order, one restores a stack that no longer exists, and
    the next signal kills the process.
    """
    return ov.Core()


def capabilities() -> list[str]:
    """Returns the data types in which OpenVINO computes on this CPU: FP32, INT8, BF16, …"""
    types: list[str] = core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return types


def computes_bf16() -> bool:
    """Tells whether OpenVINO computes bf16; OV_CPU_MAX_ISA can forbid it to use the CPU's bf16."""
    return "BF16" in capabilities()


def computes_int8() -> bool:
    """Tells whether OpenVINO multiplies eight-bit integers with VNNI or AMX on this machine.

    OpenVINO reports INT8 on any CPU; without these instructions int8 is as slow as fp32 and rounds
    differently. It uses those of AVX-512 unless OV_CPU_MAX_ISA forbids AVX-512; the capability
    WINOGRAD shows that AVX-512 is allowed.
    """
    features = cpu_features()
    if "AVX512F" not in features:
        return "AVX_VNNI" in features
    return bool(features & {"AVX512_VNNI", "AMX_INT8"}) and "WINOGRAD" in capabilities()


def check_precision(precision: Precision) -> None:
    """Raises ConfigInvalid for a precision that OpenVINO cannot compute on this machine."""
    if precision == "bf16" and not computes_bf16():
        raise ConfigInvalid("bf16 needs a CPU with bf16 instructions", remedy="use precision fp32")
    if precision == "int8" and not computes_int8():
        raise ConfigInvalid("int8 needs a CPU with VNNI or AMX", remedy="use precision fp32")


def read_onnx(path: Path) -> ov.Model:
    """Reads a graph; raises ArtifactInvalid for a file that is not ONNX."""
    return _read_graph(path, "ONNX", remedy="restore it, or convert it again")


def read_int8(path: Path) -> ov.Model:
    """Reads a graph in OpenVINO's own format; raises ArtifactInvalid for another format."""
    return _read_graph(path, "a graph", remedy="make it again with `mlcd quantize`")


def _read_graph(path: Path, kind: str, *, remedy: str) -> ov.Model:
    try:
        return core().read_model(path)
    except RuntimeError as error:
        raise ArtifactInvalid(f"{path} cannot be read as {kind}", remedy=remedy) from error


def open_model_artifact(path: Path, options: EncoderOptions = DEFAULTS) -> OpenVinoEncoder:
    """Opens the graph of a model artifact: `model.onnx` of `mlcd export` (uint8 pixels to unit
    rows), or for int8 the graph of `mlcd quantize`.
    """
    artifact = open_artifact(path, "model", verify_files=False)
    check_precision(options.precision)
    if in_int8 := options.precision == "int8":
        _require_int8_graph(artifact)
    graph_files = {INT8_GRAPH, INT8_WEIGHTS} if in_int8 else {ONNX}
    # torch's weights are as large as the graph; OpenVINO does not read them, so no check of them.
    for name in artifact.files.keys() & (graph_files | {_PREPROCESSING}):
        verify_file(artifact, name)
    if artifact.fingerprint is None:
        raise ArtifactInvalid(f"{path} lacks a fingerprint", remedy="export the model again")
    return OpenVinoEncoder(
        read_int8(artifact.file(INT8_GRAPH)) if in_int8 else read_onnx(artifact.file(ONNX)),
        name=model_name(artifact.config.get("name")),
        fingerprint=artifact.fingerprint,
        preprocess=PreprocessSpec.read(artifact.file(_PREPROCESSING)),
        precision=options.precision,
        revision=_revision(artifact) if in_int8 else "",
        num_threads=options.num_threads,
    )


def _require_int8_graph(artifact: Artifact) -> None:
    if not {INT8_GRAPH, INT8_WEIGHTS} <= artifact.files.keys():
        raise ConfigInvalid(
            f"int8 needs an int8 graph, which {artifact.path} lacks",
            remedy=f"make one with `mlcd quantize {artifact.path} IMAGES OUT`, and give OUT",
        )


def _revision(artifact: Artifact) -> str:
    """Returns a digest of the int8 graph, because graphs of one fingerprint that were calibrated
    on different images return different rows.
    """
    digests = "".join(artifact.files[name].sha256 for name in (INT8_GRAPH, INT8_WEIGHTS))
    return sha256(digests.encode()).hexdigest()[:_REVISION_DIGITS]


def open_text(part: TextPart, options: EncoderOptions = DEFAULTS) -> LocalTextEncoder:
    """Opens the graph of a model artifact's text part; with precision int8 it runs in fp32."""
    graph = read_onnx(part.folder / GRAPH)
    precision: Precision = "fp32" if options.precision == "int8" else options.precision
    compiled = _Compiled(graph, precision, options.num_threads)
    return LocalTextEncoder(
        part, compiled.run, compiled.close, engine="openvino", precision=precision
    )


def open_external(path: Path, options: EncoderOptions = DEFAULTS) -> OpenVinoEncoder:
    """Opens any ONNX image encoder; the JSON of the same name contains its preprocessing.

    The fingerprint is the SHA-256 of both files. Raises ConfigInvalid naming the wrong or missing
    field of the JSON.
    """
    sidecar = path.with_suffix(".json")
    if not path.is_file():
        raise NotFound(f"the model {path} does not exist")
    if not sidecar.is_file():
        raise ConfigInvalid(
            f"{sidecar} is missing", remedy=f"describe the preprocessing of {path.name} in it"
        )
    card = _read_card(sidecar)
    preprocess = card.preprocess()
    model = read_onnx(path)
    with _translate_errors():
        model = _add_preprocessing(model, card, preprocess, path)
    fingerprint = sha256(path.read_bytes() + b"\0" + sidecar.read_bytes()).hexdigest()
    return OpenVinoEncoder(
        model,
        name=model_name(card.name or path.stem),
        fingerprint=fingerprint,
        preprocess=preprocess,
        precision=options.precision,
        num_threads=options.num_threads,
    )


def _read_card(sidecar: Path) -> _Card:
    try:
        return _Card.model_validate_json(sidecar.read_bytes())
    except OSError as error:
        raise ConfigInvalid(f"{sidecar} cannot be read") from error
    except ValidationError as error:
        details = error.errors()[0]
        name = ".".join(str(part) for part in details["loc"])
        fields = ", ".join(_Card.model_fields)
        raise ConfigInvalid(
            f"{sidecar}: {name} {details['msg'].lower()}", remedy=f"known: {fields}"
        ) from error


def _add_preprocessing(model: ov.Model, card: _Card, spec: PreprocessSpec, path: Path) -> ov.Model:
    """Returns a graph that takes uint8 pixels, normalizes them, and returns only the embedding."""
    inputs, outputs = (
        [port.get_any_name() for port in ports] for ports in (model.inputs, model.outputs)
    )
    if inputs != [card.input] or card.output not in outputs:
        raise ConfigInvalid(
            f"{path} must have the input {card.input} and the output {card.output}, got inputs"
            f" {inputs} and outputs {outputs}",
            remedy="correct their names in the JSON beside it",
        )
    shape = (
        [-1, 3, spec.crop, spec.crop] if card.layout == "NCHW" else [-1, spec.crop, spec.crop, 3]
    )
    model.reshape({card.input: ov.PartialShape(shape)})
    output = model.output(card.output)
    model = ov.Model(
        [output.get_node().input_value(0)], model.get_parameters(), card.name or path.stem
    )
    output_shape = model.output(0).partial_shape
    if len(output_shape) != 2 or output_shape[1] != card.dimension:
        raise ConfigInvalid(
            f"{card.output} of {path} must have the shape [N, {card.dimension}], got"
            f" {output_shape}",
            remedy="correct the JSON",
        )
    steps = PrePostProcessor(model)
    steps.input().tensor().set_element_type(ov.Type.u8).set_layout(ov.Layout("NCHW"))
    steps.input().model().set_layout(ov.Layout(card.layout))
    scale = [255.0 * std for std in spec.std]
    steps.input().preprocess().convert_element_type(ov.Type.f32).mean(
        [255.0 * mean for mean in spec.mean]
    ).scale(scale)
    return steps.build()


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise Unavailable("the OpenVINO engine failed", remedy="the log says why") from error
