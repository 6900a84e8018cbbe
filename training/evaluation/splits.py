"""Which samples are trained on, validated on and tested on; a pure function of the keys and classes."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import InvalidInput
from mlcd.keys import held_out
from mlcd.types import SampleKey

VALIDATION_FRACTION: Final = 0.2  # of what is not held out; CLIP states no share


@dataclass(frozen=True)
class Split:
    """train, validation, test: bool [N] each, disjoint, together all."""

    train: NDArray[np.bool_]
    validation: NDArray[np.bool_]
    test: NDArray[np.bool_]


def split_samples(splits: NDArray[np.float64], hold_out: float) -> Split:
    """test: the held-out share of each class (see mlcd.keys). validation: the next samples of the same order."""
    test = held_out(splits, hold_out)
    validation = held_out(splits, hold_out + VALIDATION_FRACTION * (1 - hold_out)) & ~test
    return Split(~test & ~validation, validation, test)


def split_digest(keys: Sequence[SampleKey], class_names: Sequence[str], test: NDArray[np.bool_]) -> str:
    """SHA-256 over key, class and part (known or test) of every sample: two results with the same one compare.

    Where there is a validation part, it follows from these by VALIDATION_FRACTION.
    """
    sha256 = hashlib.sha256()
    for key, class_name, is_test in sorted(zip(keys, class_names, test.tolist(), strict=True)):
        sha256.update(f"{key}\0{class_name}\0{'test' if is_test else 'known'}\n".encode())
    return sha256.hexdigest()


def check_several_classes(class_names: Sequence[str]) -> None:
    """Raises InvalidInput where there is nothing to tell apart."""
    if len(set(class_names)) == 1:
        raise InvalidInput(
            f"all {len(class_names)} images are of one class, {class_names[0]}", remedy="give at least two classes"
        )


def check_probe_split(class_names: Sequence[str], split: Split) -> None:
    """Raises InvalidInput where a linear probe cannot be trained, chosen or tested."""
    check_several_classes(class_names)
    for name in ("train", "validation", "test"):
        if not getattr(split, name).any():
            raise InvalidInput(
                f"of {len(class_names)} images none falls into the {name} part",
                remedy="give more images per class, or hold out another share",
            )
    num_train, num_classes = int(split.train.sum()), len(set(class_names))
    if num_train < num_classes:
        raise InvalidInput(
            f"{num_train} images to train on are fewer than the {num_classes} classes",
            remedy="give more images per class, or hold out less",
        )
    known = {name for name, train in zip(class_names, split.train.tolist(), strict=True) if train}
    if missing := sorted(set(class_names) - known):
        raise InvalidInput(
            f"class {missing[0]} has no image to train on ({len(missing)} such classes)",
            remedy="give more images of it, or hold out less",
        )
