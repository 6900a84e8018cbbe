"""Checks the fields of other projects' configs; an error names file and field."""

from pathlib import Path
from typing import Any

from mlcd.errors import ConfigInvalid
from mlcd.models.blocks import ACTIVATIONS


def expect(path: Path, name: str, value: object, supported: object) -> None:
    if value != supported:
        raise ConfigInvalid(f"{path}: {name} must be {supported!r}, got {value!r}")


def as_activation(path: Path, name: object) -> Any:
    if name not in ACTIVATIONS:
        raise ConfigInvalid(
            f"{path}: hidden_act must be one of {', '.join(ACTIVATIONS)}, got {name!r}"
        )
    return name


def as_size(path: Path, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigInvalid(f"{path}: {name} must be a positive integer, got {value!r}")
    return value


def square_side(path: Path, name: str, value: object) -> int:
    """Returns the side of a square, given as one number or as two equal numbers."""
    sides = value if isinstance(value, list | tuple) else [value]
    if len(set(sides)) != 1:
        raise ConfigInvalid(f"{path}: {name} must be a square, got {value!r}")
    return as_size(path, name, sides[0])


def as_triple(path: Path, name: str, value: object) -> tuple[float, float, float]:
    if (
        not isinstance(value, list | tuple)
        or len(value) != 3
        or not all(isinstance(x, int | float) for x in value)
    ):
        raise ConfigInvalid(f"{path}: {name} must be three numbers, got {value!r}")
    return float(value[0]), float(value[1]), float(value[2])
