"""Opens encoders (prepared pixels to embeddings) by name; each engine has its own file."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from mlcd.artifacts.manifest import MANIFEST, Artifact, open_artifact, read_manifest
from mlcd.cores import DEVICES, has_gpu
from mlcd.encoders.encoder import Encoder
from mlcd.encoders.endpoint_forms import is_endpoint
from mlcd.encoders.options import DEFAULTS, EncoderOptions
from mlcd.errors import ConfigInvalid, NoTextTower, NotFound
from mlcd.extras import install_command, install_command_for, missing_package
from mlcd.images.jpeg import require_simplejpeg
from mlcd.images.transform import PreprocessSpec
from mlcd.models.text_part import FOLDER as TEXT
from mlcd.models.text_part import SETTINGS, WEIGHTS
from mlcd.types import Fingerprint

if TYPE_CHECKING:  # text encoders need the package tokenizers, image encoders do not
    from mlcd.encoders.text_encoder import TextEncoder

# If this package is installed, openvino reports every import to its vendor, unless a file of the
# user forbids it.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

_WARM_BATCHES: Final = (1, 4)
_CLASSICAL: Final = ("hog", "pixels")
_TEXT_SETTINGS: Final = f"{TEXT}/{SETTINGS}"


@dataclass(frozen=True)
class Choice:
    """The engine that `auto` selects on this machine, and the reason."""

    engine: Literal["openvino", "torch"]
    reason: str


def choose_engine(devices: Path = DEVICES) -> Choice:
    """Returns the engine for this machine: torch for a CUDA GPU, OpenVINO for a CPU.

    Imports torch only if a GPU's device file is visible.
    """
    if has_gpu(devices) and _cuda_works():
        return Choice("torch", "a CUDA GPU is visible and torch can use it")
    if _is_installed("openvino"):
        return Choice(
            "openvino", "there is no usable CUDA GPU, and OpenVINO is the engine for CPUs"
        )
    if _is_installed("torch"):
        return Choice("torch", "OpenVINO is not installed")
    return Choice("openvino", f"no engine is installed: {install_command('serve')}")


def open_encoder(spec: str, options: EncoderOptions = DEFAULTS) -> Encoder:
    """Opens a model artifact, embeddings without their model, an `.onnx` file with its JSON, an
    endpoint, `hog` or `pixels`, and warms it up.

    Raises NotFound, ConfigInvalid or ArtifactInvalid; each names what is missing. Raises
    Unavailable for an endpoint that is away.
    """
    with _explain_missing_package(spec):
        encoder = _open(spec, options)
    _override_preprocessing(encoder, spec, options)
    if not is_endpoint(spec):
        _warm_up(encoder)
    return encoder


def has_text(spec: str) -> bool:
    """Tells from its manifest, or an endpoint's answers, whether a model also embeds texts."""
    if is_endpoint(spec):
        with _explain_missing_package(spec):
            from mlcd.encoders import endpoint

            return endpoint.endpoint_has_text(spec)
    path = Path(spec)
    return (path / MANIFEST).is_file() and _TEXT_SETTINGS in read_manifest(path).files


def open_text_encoder(spec: str, options: EncoderOptions = DEFAULTS) -> "TextEncoder":
    """Opens the text tower of a model artifact, and warms it up.

    Raises NoTextTower if the model embeds only images, and the errors of `open_encoder`.
    """
    if is_endpoint(spec):
        with _explain_missing_package(spec):
            return _open_endpoint_text(spec, options)
    if not has_text(spec):
        if spec not in _CLASSICAL and not Path(spec).exists():
            raise _model_missing(spec)
        raise NoTextTower(spec)
    with _explain_missing_package(spec):
        encoder = _open_text(open_artifact(Path(spec), "model"), options)
    encoder.encode(encoder.tokenizer(["a photo"]))
    return encoder


def _open_endpoint_text(spec: str, options: EncoderOptions) -> "TextEncoder":
    from mlcd.encoders import endpoint

    encoder = endpoint.open_endpoint_text(spec, options)
    preprocess = encoder.preprocess
    encoder.fingerprint = _apply_options(None, encoder.fingerprint, preprocess, options)[1]
    return encoder


def _open_text(artifact: Artifact, options: EncoderOptions) -> "TextEncoder":
    from mlcd.encoders.local_text import open_text_part

    preprocess = PreprocessSpec.read(artifact.file("preprocess.json"))
    part = open_text_part(artifact)
    part = replace(
        part, fingerprint=_apply_options(artifact, part.fingerprint, preprocess, options)[1]
    )
    if _select_engine(artifact, options, f"{TEXT}/{WEIGHTS}") == "torch":
        from mlcd.encoders import torch

        return torch.open_text(part, options)
    from mlcd.encoders import openvino

    return openvino.open_text(part, options)


def _select_engine(
    artifact: Artifact, options: EncoderOptions, weights: str
) -> Literal["openvino", "torch"]:
    """Returns the engine for a tower: OpenVINO for int8 and for a graph without a file of weights,
    otherwise the requested engine.
    """
    if options.precision == "int8":
        if options.engine == "torch":
            raise ConfigInvalid("int8 needs the engine openvino, got torch")
        return "openvino"
    if weights not in artifact.files:
        if options.engine == "torch":
            raise ConfigInvalid(
                f"the engine torch needs {weights}, which {artifact.path} lacks",
                remedy="use engine openvino",
            )
        return "openvino"
    return choose_engine().engine if options.engine == "auto" else options.engine


def _override_preprocessing(encoder: Encoder, spec: str, options: EncoderOptions) -> None:
    is_artifact = not is_endpoint(spec) and (Path(spec) / MANIFEST).is_file()
    artifact = open_artifact(Path(spec), verify_files=False) if is_artifact else None
    encoder.preprocess, encoder.fingerprint = _apply_options(
        artifact, encoder.fingerprint, encoder.preprocess, options
    )
    if encoder.preprocess.decode == "fast":
        require_simplejpeg()


def _apply_options(
    artifact: Artifact | None,
    fingerprint: Fingerprint,
    preprocess: PreprocessSpec,
    options: EncoderOptions,
) -> tuple[PreprocessSpec, Fingerprint]:
    """Returns the preprocessing with the options applied, and the model's fingerprint with it."""
    requested = replace(
        preprocess, exif=options.exif or preprocess.exif, decode=options.decode or preprocess.decode
    )
    if requested == preprocess:
        return preprocess, fingerprint
    # equals the fingerprint of an export with this preprocessing
    weights_digest = (
        fingerprint if artifact is None else artifact.summary.get("weights_digest", fingerprint)
    )
    return requested, requested.fingerprint(weights_digest)


def _open(spec: str, options: EncoderOptions) -> Encoder:
    if is_endpoint(spec):
        from mlcd.encoders import endpoint

        return endpoint.open_endpoint(spec, options)
    if spec in _CLASSICAL:
        if options.engine != "auto":
            raise ConfigInvalid(
                f"{spec} does not run on {options.engine}", remedy="use engine auto"
            )
        if options.precision != "fp32":
            raise ConfigInvalid(f"{spec} needs precision fp32, got {options.precision}")
        return _open_classical(spec)
    path = Path(spec)
    if (path / MANIFEST).is_file():
        if read_manifest(path).kind == "embeddings":
            from mlcd.encoders.vectors_only import VectorsOnlyEncoder

            return VectorsOnlyEncoder(path)
        return _open_model_artifact(path, options)
    if path.suffix == ".onnx":
        if options.engine == "torch":
            raise ConfigInvalid(
                f"torch cannot run the ONNX graph {spec}", remedy="use engine openvino"
            )
        if options.precision == "int8":
            raise ConfigInvalid(
                f"an ONNX graph cannot run in int8: {spec}",
                remedy="use precision fp32 or bf16; `mlcd quantize` needs a model of `mlcd export`",
            )
        from mlcd.encoders.openvino import open_external

        return open_external(path, options)
    raise _model_missing(spec)


def _model_missing(spec: str) -> NotFound:
    return NotFound(
        f"the model {spec} does not exist",
        remedy="give starter, a directory of `mlcd export`, an .onnx file, the URL of an endpoint,"
        " hog or pixels",
    )


@contextmanager
def _explain_missing_package(spec: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigInvalid(
            f"{spec} needs the package {missing_package(error)}, which is not installed",
            remedy=install_command_for(missing_package(error), likely="serve"),
        ) from error


def _open_classical(name: str) -> Encoder:
    if name == "pixels":
        from mlcd.encoders.pixels import PixelsEncoder

        return PixelsEncoder()
    from mlcd.encoders.hog import HogEncoder

    return HogEncoder()


def _open_model_artifact(path: Path, options: EncoderOptions) -> Encoder:
    if _select_engine(read_manifest(path), options, WEIGHTS) == "torch":
        from mlcd.encoders import torch

        return torch.open_model_artifact(path, options)
    from mlcd.encoders import openvino

    return openvino.open_model_artifact(path, options)


def _warm_up(encoder: Encoder) -> None:
    """Encodes two batches, so that kernels are compiled and memory is allocated before the first
    request.
    """
    side = encoder.preprocess.crop
    for num in _WARM_BATCHES:
        encoder.encode(np.zeros((num, 3, side, side), np.uint8))


def _cuda_works() -> bool:
    try:
        from mlcd.encoders.torch import cuda_available
    except (ImportError, OSError):  # torch is not installed, or its libraries do not load
        return False
    return cuda_available()


def _is_installed(package: str) -> bool:
    return find_spec(package) is not None
