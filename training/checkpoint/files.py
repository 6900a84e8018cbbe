"""Tensors of several processes as files, by torch.distributed.checkpoint.

The files are safetensors instead of its own format, which is a pickle. A DTensor is written in the
parts that processes own and read in the parts that they need, so any number of processes can read
what any other number wrote.
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

# One process is intended where there is only one.
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
    """Fills `tensors`, which are of the stored sizes and types, or DTensors of these.

    Every process of `group` calls it, or, with `alone`, only this one. Raises ArtifactInvalid if
    the files are damaged.
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
    # safetensors raises errors of its own, among others.
    try:
        stored = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    except Exception as error:
        raise _unreadable(directory) from error
    tensors = {
        name: facts for name, facts in stored.items() if isinstance(facts, TensorStorageMetadata)
    }
    return {name: (facts.size, facts.properties.dtype) for name, facts in tensors.items()}


def _unreadable(directory: Path) -> ArtifactInvalid:
    return ArtifactInvalid(f"{directory} cannot be read", remedy="go on from an older checkpoint")


class _Writer(HuggingFaceStorageWriter):
    """Writes bytes that depend on the content alone; safetensors orders a header's remarks at
    random.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory), save_distributed=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        for name in {result.storage_data.relative_path for result in written.value()}:
            _sort_remarks(Path(self.path) / name)
        return written


def _sort_remarks(path: Path) -> None:
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(_HEADER_BYTES), "little")
        header = json.loads(file.read(length))
        ordered = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
        file.seek(_HEADER_BYTES)
        file.write(json.dumps(ordered, separators=(",", ":")).encode().ljust(length))
        file.flush()
        os.fsync(file.fileno())
