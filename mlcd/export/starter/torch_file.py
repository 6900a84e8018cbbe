"""Reads the arrays of a state dict that torch saved before version 1.6, without torch.

No code of the file runs: its pickle may only refer to OrderedDict, float and integer storages, and
torch's function that makes a tensor from a storage.
"""

import pickle
from collections import OrderedDict
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from mlcd.errors import ArtifactInvalid

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_DTYPES: Final = {"FloatStorage": np.dtype("<f4"), "LongStorage": np.dtype("<i8")}


def read_state(path: Path) -> dict[str, NDArray[Any]]:
    """Returns the arrays by name; raises ArtifactInvalid if the file contains anything else."""
    try:
        return _read(BytesIO(path.read_bytes()))
    except (OSError, EOFError, ValueError, TypeError, pickle.UnpicklingError) as error:
        raise ArtifactInvalid(
            f"{path} cannot be read as a state dict of torch", remedy="install its package again"
        ) from error


def _read(file: BytesIO) -> dict[str, NDArray[Any]]:
    # five pickles, then the storages, each as its length and its numbers
    if _Reader(file).load() != _MAGIC:
        raise pickle.UnpicklingError("the file must start with torch's magic number")
    _Reader(file).load()  # the version of the format
    _Reader(file).load()  # byte order and sizes of the machine
    reader = _Reader(file)
    views: dict[str, _View] = reader.load()
    storages: dict[str, NDArray[Any]] = {}
    for key in _Reader(file).load():
        (length,) = np.frombuffer(file.read(8), "<i8")
        dtype = reader.dtypes[key]
        storages[key] = np.frombuffer(file.read(int(length) * dtype.itemsize), dtype)
    return {name: view(storages) for name, view in views.items()}


_View = Callable[[dict[str, NDArray[Any]]], NDArray[Any]]


class _Reader(pickle.Unpickler):
    """An unpickler that returns the names of storages and functions that make views of them."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)
        self.dtypes: dict[str, np.dtype[Any]] = {}

    def persistent_load(self, identity: Any) -> str:
        kind, dtype, key, *_ = identity
        if kind != "storage":
            raise pickle.UnpicklingError(f"a persistent id must be of a storage, got {kind}")
        self.dtypes[key] = dtype
        return str(key)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _view
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise pickle.UnpicklingError(f"a state dict cannot contain {module}.{name}")


def _view(
    key: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: object
) -> _View:
    def make_view(storages: dict[str, NDArray[Any]]) -> NDArray[Any]:
        flat = storages[key][offset:]
        last = sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
        if offset < 0 or min((*shape, 1)) < 1 or min((*stride, 0)) < 0 or last >= len(flat):
            raise pickle.UnpicklingError("a tensor exceeds its storage")
        steps = [step * flat.itemsize for step in stride]
        return as_strided(flat, shape, steps, writeable=False).copy()

    return make_view
