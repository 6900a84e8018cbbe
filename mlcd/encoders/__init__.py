"""Encoders: adapters from prepared pixels to embeddings, one file per engine, opened by name here."""

from pathlib import Path

from mlcd.artifact import MANIFEST
from mlcd.encoders.base import Encoder, Precision
from mlcd.errors import ConfigInvalid, NotFound


def open_encoder(spec: str, *, precision: Precision = "fp32", num_threads: int = 0) -> Encoder:
    """The encoder named by `spec`: a model artifact, an `.onnx` file with its JSON, `hog` or `pixels`.

    Raises NotFound, ConfigInvalid or ArtifactInvalid; each names what is missing.
    """
    try:
        if spec in ("hog", "pixels"):
            if precision != "fp32":
                raise ConfigInvalid(f"{spec} is computed in fp32 only")
            return _open_classical(spec)
        path = Path(spec)
        if (path / MANIFEST).is_file():
            from mlcd.encoders.openvino import open_model_artifact

            return open_model_artifact(path, precision=precision, num_threads=num_threads)
        if path.suffix == ".onnx":
            from mlcd.encoders.openvino import open_external

            return open_external(path, precision=precision, num_threads=num_threads)
    except ImportError as error:
        raise ConfigInvalid(
            f"{spec} needs a package that is not installed", remedy="pip install 'mlcd[serve,train]'"
        ) from error
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
