"""Rows of class centers spread over processes: who owns which, and files that any number of processes can read."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mlcd.errors import ArtifactInvalid, ConfigInvalid

_NUM_CLASSES: Final = "num_classes"
_DIGITS: Final = 12


@dataclass(frozen=True)
class Shard:
    """Classes [start, stop) of num_classes, owned by one process."""

    start: int
    stop: int
    num_classes: int

    @classmethod
    def of(cls, rank: int, size: int, num_classes: int) -> "Shard":
        """Contiguous and balanced: the first num_classes % size processes own one class more."""
        each, more = divmod(num_classes, size)
        start = each * rank + min(rank, more)
        return cls(start, start + each + (rank < more), num_classes)

    def __len__(self) -> int:
        return self.stop - self.start


def save_rows(directory: Path, shard: Shard, tensors: Mapping[str, Tensor]) -> Path:
    """Write one process's rows (dimension 0 of every tensor) as `rows-START-STOP.safetensors`, whole or not at all."""
    path = rows_path(directory, shard)
    temporary = path.with_name(f".{path.name}.tmp")
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(content, temporary, metadata={_NUM_CLASSES: str(shard.num_classes)})
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.rename(path)
    return path


def rows_path(directory: Path, shard: Shard) -> Path:
    """Where `save_rows` writes."""
    return directory / f"rows-{shard.start:0{_DIGITS}d}-{shard.stop:0{_DIGITS}d}.safetensors"


def load_rows(directory: Path, shard: Shard) -> dict[str, Tensor]:
    """The rows of `shard` from the files of any number of processes.

    Raises ConfigInvalid when they are of another number of classes, ArtifactInvalid when rows are missing.
    """
    pieces: dict[str, list[Tensor]] = {}
    reached = shard.start
    for path in sorted(directory.glob("rows-*.safetensors")):
        start, stop = (int(part) for part in path.stem.split("-")[1:])
        with safe_open(path, framework="pt") as file:
            num_classes = int(file.metadata()[_NUM_CLASSES])
            if num_classes != shard.num_classes:
                raise ConfigInvalid(
                    f"{directory} holds centers of {num_classes} classes, not {shard.num_classes}",
                    remedy="use the labels that they were trained with",
                )
            first, last = max(start, reached), min(stop, shard.stop)
            if start > reached or first >= last:
                continue
            for name in file.keys():  # noqa: SIM118 - not a dict
                pieces.setdefault(name, []).append(file.get_slice(name)[first - start : last - start])
            reached = last
    if reached != shard.stop:
        raise ArtifactInvalid(f"{directory} has no rows of class {reached}", remedy="restore its missing files")
    return {name: torch.cat(parts) for name, parts in pieces.items()}
