"""Tensors of several processes as files, by torch.distributed.checkpoint.

The files are safetensors, because the library's own format is a pickle. Each process writes the
parts of a DTensor that it owns and reads the parts that it needs, so a checkpoint can be read by
another number of processes than wrote it.
"""

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mlcd.errors import ArtifactInvalid

STATE: Final = "state"  # the directory in a checkpoint
_HEADER_BYTES: Final = 8

# A run of one process uses torch.distributed.checkpoint without a process group on purpose.
warnings.filterwarnings(
    "ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning
)


def write_tensors(tensors: Mapping[str, Tensor], directory: Path, group: Any) -> None:
    """Writes `directory`, with one file for each process.

    Every process of `group` calls it and returns when all are done. An error on any process is
    raised on all of them.
    """
    try:
        save(dict(sorted(tensors.items())), storage_writer=_Writer(directory), process_group=group)
    except CheckpointException as error:
        cause, _ = min(error.failures.items())[1]
        raise cause from error


def read_tensors(
    tensors: dict[str, Tensor], directory: Path, group: Any = None, *, alone: bool = False
) -> None:
    """Fills `tensors`, which have the stored sizes and dtypes, or are DTensors of these.

    Every process of `group` calls it; with alone=True only this process does. Raises
    ArtifactInvalid if the files are damaged.
    """
    try:
        load(
            tensors,
            storage_reader=HuggingFaceStorageReader(str(directory)),
            process_group=group,
            no_dist=alone,
        )
    except CheckpointException as error:
        raise _unreadable(directory) from error


def read_tensor_sizes(directory: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Returns size and type of every tensor in `directory`, by name.

    Raises ArtifactInvalid if it cannot be read.
    """
    # safetensors and the reader raise errors of many types.
    try:
        stored = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    except Exception as error:
        raise _unreadable(directory) from error
    tensors = {
        name: facts for name, facts in stored.items() if isinstance(facts, TensorStorageMetadata)
    }
    return {name: (facts.size, facts.properties.dtype) for name, facts in tensors.items()}


def _unreadable(directory: Path) -> ArtifactInvalid:
    return ArtifactInvalid(f"{directory} cannot be read", remedy="resume from an older checkpoint")


class _Writer(HuggingFaceStorageWriter):
    """Writes the same bytes for the same content: sorts a header's `__metadata__`, whose order in
    safetensors is random.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory), save_distributed=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        for name in {result.storage_data.relative_path for result in written.value()}:
            _sort_metadata(Path(self.path) / name)
        return written


def _sort_metadata(path: Path) -> None:
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(_HEADER_BYTES), "little")
        header = json.loads(file.read(length))
        ordered = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
        file.seek(_HEADER_BYTES)
        file.write(json.dumps(ordered, separators=(",", ":")).encode().ljust(length))
        file.flush()
        os.fsync(file.fileno())
