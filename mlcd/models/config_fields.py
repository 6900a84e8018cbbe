"""The fields of other projects' configs, each checked as it is read; an error names file and
field.
"""

from pathlib import Path
from typing import Any

from mlcd.errors import ConfigInvalid
from mlcd.models.blocks import ACTIVATIONS


def expect(path: Path, name: str, value: object, plain: object) -> None:
    if value != plain:
        raise ConfigInvalid(f"{path}: {name} is {value!r}; only {plain!r} is supported")


def activation(path: Path, name: object) -> Any:
    if name not in ACTIVATIONS:
        raise ConfigInvalid(
            f"{path}: hidden_act is {name!r}", remedy=f"known: {', '.join(ACTIVATIONS)}"
        )
    return name


def whole(path: Path, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigInvalid(f"{path}: {name} is {value!r}, not a positive whole number")
    return value


def square_side(path: Path, name: str, value: object) -> int:
    """Returns a square's side, given as one number or as two equal ones."""
    sides = value if isinstance(value, list | tuple) else [value]
    if len(set(sides)) != 1:
        raise ConfigInvalid(f"{path}: {name} is {value!r}; only squares are supported")
    return whole(path, name, sides[0])


def triple(path: Path, name: str, value: object) -> tuple[float, float, float]:
    if (
        not isinstance(value, list | tuple)
        or len(value) != 3
        or not all(isinstance(x, int | float) for x in value)
    ):
        raise ConfigInvalid(f"{path}: {name} is {value!r}, not three numbers")
    return float(value[0]), float(value[1]), float(value[2])
