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

# The graph in int8 of a model artifact, beside that in fp32: OpenVINO's own format, in two files.
INT8_GRAPH: Final = "int8.xml"
INT8_WEIGHTS: Final = "int8.bin"
ONNX: Final = "model.onnx"
_PREPROCESSING: Final = "preprocess.json"
_DIGITS: Final = 12  # hex digits of a graph's digest in the precision
# of int8: the layers that its graph leaves in floating point
_HINTS: Final[dict[Precision, Any]] = {
    "fp32": ov.Type.f32,
    "bf16": ov.Type.bf16,
    "int8": ov.Type.f32,
}


class _Card(BaseModel):
    """The JSON beside an external ONNX encoder: the preprocessing of its pixels, and the output
    that is the embedding.
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
    """One compiled model of dynamic shapes, which computes one batch at a time.

    One model per batch size was measured against it and was slower (docs/explanation/engines.md).
    """

    def __init__(self, model: ov.Model, precision: Precision, num_threads: int) -> None:
        """num_threads: 0 takes all cores that the process may use."""
        check_precision(precision)
        threads = num_threads or available_cores()
        config = {
            "INFERENCE_PRECISION_HINT": _HINTS[precision],
            # one stream on all threads, because the batcher above makes the batches
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
            # Pinning binds threads to cores from the first on: two processes with some threads each
            # would share those.
            "ENABLE_CPU_PINNING": threads >= available_cores(),
        }
        with _translate_errors():
            self.request: Any = core().compile_model(model, "CPU", config).create_infer_request()
        self._lock = threading.Lock()

    def run(self, batch: NDArray[Any]) -> NDArray[np.float32]:
        with self._lock, _translate_errors():
            if self.request is None:
                raise Unavailable("the encoder is closed", remedy="open the model again")
            # The result is the request's own memory, which the next inference overwrites.
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
        """revision: tells graphs of one model and precision apart. num_threads: 0 takes all cores
        that the process may use.
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
    """Returns the one Core of this process, which is never ended.

    Its CPU plugin exchanges the stack that signal handlers run on and restores the earlier one when
    it ends. Of two Cores that do not end in reverse order, the later one restores a stack that no
    longer exists: the next signal kills the process.
    """
    return ov.Core()


def capabilities() -> list[str]:
    """Returns the types in which OpenVINO computes on this CPU: FP32, INT8, BF16, …"""
    types: list[str] = core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return types


def computes_bf16() -> bool:
    """Asks OpenVINO whether it computes bf16; it may be told not to use what the CPU has
    (OV_CPU_MAX_ISA).
    """
    return "BF16" in capabilities()


def computes_int8() -> bool:
    """Tells whether OpenVINO multiplies eight-bit integers by VNNI or AMX here.

    It multiplies them on any CPU, and calls that INT8; without these instructions that is as slow
    as fp32, and rounds differently. Those of AVX-512 are used where OpenVINO may use that at all
    (OV_CPU_MAX_ISA), which it shows by WINOGRAD.
    """
    features = cpu_features()
    if "AVX512F" not in features:
        return "AVX_VNNI" in features
    return bool(features & {"AVX512_VNNI", "AMX_INT8"}) and "WINOGRAD" in capabilities()


def check_precision(precision: Precision) -> None:
    """Raises ConfigInvalid for a precision that OpenVINO does not compute on this machine."""
    if precision == "bf16" and not computes_bf16():
        raise ConfigInvalid("bf16 needs a CPU with bf16 instructions", remedy="use precision fp32")
    if precision == "int8" and not computes_int8():
        raise ConfigInvalid("int8 needs a CPU with VNNI or AMX", remedy="use precision fp32")


def read_onnx(path: Path) -> ov.Model:
    """Reads a graph; raises ArtifactInvalid for a file that is not ONNX."""
    return _read_graph(path, "ONNX", remedy="restore or convert it again")


def read_int8(path: Path) -> ov.Model:
    """Reads a graph in OpenVINO's own format; raises ArtifactInvalid for another file."""
    return _read_graph(path, "a graph", remedy="make it again with `mlcd quantize`")


def _read_graph(path: Path, kind: str, *, remedy: str) -> ov.Model:
    try:
        return core().read_model(path)
    except RuntimeError as error:
        raise ArtifactInvalid(f"{path} cannot be read as {kind}", remedy=remedy) from error


def open_model_artifact(path: Path, options: EncoderOptions = DEFAULTS) -> OpenVinoEncoder:
    """Opens a model written by `mlcd export`: `model.onnx` takes uint8 pixels and gives
    unit rows. In int8 it opens the graph that `mlcd quantize` has added.
    """
    artifact = open_artifact(path, "model", verify_files=False)
    check_precision(options.precision)
    if in_int8 := options.precision == "int8":
        _require_graph(artifact)
    graph = {INT8_GRAPH, INT8_WEIGHTS} if in_int8 else {ONNX}
    # The weights that torch runs are as large as the graph, and nothing here reads them.
    for name in artifact.files.keys() & (graph | {_PREPROCESSING}):
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


def _require_graph(artifact: Artifact) -> None:
    if not {INT8_GRAPH, INT8_WEIGHTS} <= artifact.files.keys():
        raise ConfigInvalid(
            f"int8 needs a graph in int8, which {artifact.path} lacks",
            remedy=f"make one with `mlcd quantize {artifact.path} IMAGES OUT`, and give OUT",
        )


def _revision(artifact: Artifact) -> str:
    """Returns what the precision says of the int8 graph: two that were calibrated on other images
    give other rows for one fingerprint.
    """
    digests = "".join(artifact.files[name].sha256 for name in (INT8_GRAPH, INT8_WEIGHTS))
    return sha256(digests.encode()).hexdigest()[:_DIGITS]


def open_text(part: TextPart, options: EncoderOptions = DEFAULTS) -> LocalTextEncoder:
    """Opens the graph of a model artifact's text part; beside images in int8 it runs in fp32."""
    graph = read_onnx(part.folder / GRAPH)
    precision: Precision = "fp32" if options.precision == "int8" else options.precision
    compiled = _Compiled(graph, precision, options.num_threads)
    return LocalTextEncoder(
        part, compiled.run, compiled.close, engine="openvino", precision=precision
    )


def open_external(path: Path, options: EncoderOptions = DEFAULTS) -> OpenVinoEncoder:
    """Opens any ONNX image encoder; the JSON of the same name beside it states its preprocessing.

    The fingerprint is the SHA-256 of both files. Raises ConfigInvalid naming the field that the
    JSON lacks.
    """
    sidecar = path.with_suffix(".json")
    if not path.is_file():
        raise NotFound(f"the model {path} does not exist")
    if not sidecar.is_file():
        raise ConfigInvalid(
            f"{sidecar} is missing", remedy=f"state the preprocessing of {path.name} in it"
        )
    card = _read_card(sidecar)
    preprocess = card.preprocess()
    model = read_onnx(path)
    with _translate_errors():
        model = _with_uint8_input(model, card, preprocess, path)
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
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        fields = ", ".join(_Card.model_fields)
        raise ConfigInvalid(
            f"{sidecar}: {name} {first['msg'].lower()}", remedy=f"known: {fields}"
        ) from error


def _with_uint8_input(model: ov.Model, card: _Card, spec: PreprocessSpec, path: Path) -> ov.Model:
    """Adds cast, scale and normalization to the graph, and keeps the one output that is the
    embedding.
    """
    inputs, outputs = (
        [port.get_any_name() for port in ports] for ports in (model.inputs, model.outputs)
    )
    if inputs != [card.input] or card.output not in outputs:
        raise ConfigInvalid(
            f"{path} has inputs {inputs} and outputs {outputs}",
            remedy="name them in the JSON beside it",
        )
    shape = (
        [-1, 3, spec.crop, spec.crop] if card.layout == "NCHW" else [-1, spec.crop, spec.crop, 3]
    )
    model.reshape({card.input: ov.PartialShape(shape)})
    chosen = model.output(card.output)
    model = ov.Model(
        [chosen.get_node().input_value(0)], model.get_parameters(), card.name or path.stem
    )
    produced = model.output(0).partial_shape
    if len(produced) != 2 or produced[1] != card.dimension:
        raise ConfigInvalid(
            f"{card.output} of {path} is not [N, {card.dimension}]", remedy="correct the JSON"
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
