"""The encoders: adapters from prepared pixels to embeddings, one file per engine, opened by name
here.
"""

import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

import numpy as np

from mlcd.artifacts.manifest import MANIFEST, open_artifact
from mlcd.encoders.encoder import Encoder
from mlcd.encoders.options import DEFAULTS, EncoderOptions
from mlcd.errors import ConfigInvalid, NotFound
from mlcd.images.jpeg import require_simplejpeg

# openvino reports every import to its vendor where it finds this package, unless the user has
# forbidden it in a file.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

_DEVICES: Final = Path("/dev")
_WARM_BATCHES: Final = (1, 4)


@dataclass(frozen=True)
class Choice:
    """The engine that `auto` stands for on this machine, and why."""

    engine: Literal["openvino", "torch"]
    reason: str


def choose_engine(devices: Path = _DEVICES) -> Choice:
    """Returns the engine for this machine: torch for a CUDA GPU, OpenVINO for a CPU.

    torch is imported only where a GPU's device file is visible.
    """
    if _has_gpu(devices) and _cuda_works():
        return Choice("torch", "a CUDA GPU is visible and torch can use it")
    if _installed("openvino"):
        return Choice("openvino", "no CUDA GPU can be used, and OpenVINO is the engine for CPUs")
    if _installed("torch"):
        return Choice("torch", "OpenVINO is not installed")
    return Choice("openvino", "no engine is installed: pip install 'mlcd[serve]'")


def open_encoder(spec: str, options: EncoderOptions = DEFAULTS) -> Encoder:
    """Opens a model artifact, an `.onnx` file with its JSON, `hog` or `pixels`, and warms it up.

    Raises NotFound, ConfigInvalid or ArtifactInvalid; each names what is missing.
    """
    try:
        encoder = _open(spec, options)
    except ImportError as error:
        raise ConfigInvalid(
            f"{spec} needs a package that is not installed",
            remedy="pip install 'mlcd[serve,train]'",
        ) from error
    _prepare_otherwise(encoder, spec, options)
    _warm_up(encoder)
    return encoder


def _prepare_otherwise(encoder: Encoder, spec: str, options: EncoderOptions) -> None:
    stated = encoder.preprocess
    wanted = replace(
        stated, exif=options.exif or stated.exif, decode=options.decode or stated.decode
    )
    if wanted.decode == "fast":
        require_simplejpeg()
    if wanted == stated:
        return
    content = encoder.fingerprint
    if (Path(spec) / MANIFEST).is_file():
        # the fingerprint that an export with this preprocessing would have
        content = open_artifact(Path(spec), verify_files=False).summary.get(
            "weights_digest", content
        )
    encoder.preprocess, encoder.fingerprint = wanted, wanted.fingerprint(content)


def _open(spec: str, options: EncoderOptions) -> Encoder:
    if spec in ("hog", "pixels"):
        if options.engine != "auto":
            raise ConfigInvalid(
                f"{spec} does not run on {options.engine}", remedy="use engine auto"
            )
        if options.precision != "fp32":
            raise ConfigInvalid(f"{spec} is computed in fp32 only")
        return _open_classical(spec)
    path = Path(spec)
    if (path / MANIFEST).is_file():
        return _open_model_artifact(path, options)
    if path.suffix == ".onnx":
        if options.engine == "torch":
            raise ConfigInvalid(
                f"{spec} is an ONNX graph, which torch does not run", remedy="use engine openvino"
            )
        from mlcd.encoders.openvino import open_external

        return open_external(path, precision=options.precision, num_threads=options.num_threads)
    raise NotFound(
        f"there is no model {spec}",
        remedy="give a directory made by `mlcd export`, an .onnx file, hog or pixels",
    )


def _open_classical(name: str) -> Encoder:
    if name == "pixels":
        from mlcd.encoders.pixels import PixelsEncoder

        return PixelsEncoder()
    from mlcd.encoders.hog import HogEncoder

    return HogEncoder()


def _open_model_artifact(path: Path, options: EncoderOptions) -> Encoder:
    chosen = choose_engine().engine if options.engine == "auto" else options.engine
    if chosen == "torch":
        from mlcd.encoders import torch

        return torch.open_model_artifact(
            path, precision=options.precision, num_threads=options.num_threads
        )
    from mlcd.encoders import openvino

    return openvino.open_model_artifact(
        path, precision=options.precision, num_threads=options.num_threads
    )


def _warm_up(encoder: Encoder) -> None:
    """Encodes one image and a few, so that kernels are compiled and memory is taken before the
    first request.
    """
    side = encoder.preprocess.crop
    for num in _WARM_BATCHES:
        encoder.encode(np.zeros((num, 3, side, side), np.uint8))


def _has_gpu(devices: Path) -> bool:
    return any(devices.glob("nvidia[0-9]*")) or (devices / "dxg").exists()  # dxg: Linux on Windows


def _cuda_works() -> bool:
    try:
        from mlcd.encoders.torch import cuda_available
    except (ImportError, OSError):  # not installed, or its libraries do not load
        return False
    return cuda_available()


def _installed(package: str) -> bool:
    return find_spec(package) is not None
