"""The training, validation and test parts of a set of samples, a function of keys and classes."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import InvalidInput
from mlcd.images.dataset_parts import parts_of_classes, propose_parts
from mlcd.keys import held_out
from mlcd.types import SampleKey

# The share of the samples that are not held out. CLIP states no share.
VALIDATION_FRACTION: Final = 0.2
_ORDER: Final = ("train", "val", "test")


@dataclass(frozen=True)
class Split:
    """The parts of a set of samples.

    train, validation, test: bool [N] each, disjoint, together all. folders: the names of the known
    and of the tested folder, if folders make the split.
    """

    train: NDArray[np.bool_]
    validation: NDArray[np.bool_]
    test: NDArray[np.bool_]
    folders: tuple[str, str] | None = None

    @property
    def known(self) -> NDArray[np.bool_]:
        """The mask of the samples that are not tested on."""
        return self.train | self.validation

    def of(self, rows: NDArray[np.int64]) -> "Split":
        """Returns the split of the samples at `rows`."""
        return Split(self.train[rows], self.validation[rows], self.test[rows], self.folders)


def split_samples(splits: NDArray[np.float64], hold_out: float) -> Split:
    """Splits the samples by their positions within their class (see mlcd.keys).

    The held-out share of each class is tested on; the next samples of the same order validate.
    """
    test = held_out(splits, hold_out)
    validation = held_out(splits, hold_out + VALIDATION_FRACTION * (1 - hold_out)) & ~test
    return Split(~test & ~validation, validation, test)


def with_validation(split: Split, positions: NDArray[np.float64]) -> Split:
    """Returns the split with a validation part.

    If none was given, it is a fifth of each class by `positions` (see mlcd.keys).
    """
    if split.validation.any():
        return split
    validation = split.train & held_out(positions, VALIDATION_FRACTION)
    return Split(split.train & ~validation, validation, split.test, split.folders)


def folder_split(class_names: Sequence[str], location: str = "") -> tuple[Split, list[str]] | None:
    """Returns the split that folders make, and the classes within it; None if folders are classes.

    Folders make a split if they are the first parts of the classes' paths and at least two of them
    are called train, val, valid, validation, dev or test, in capitals or not. test is tested on;
    without it the others but train are. location: that of the images, to name the two sides by.
    Raises InvalidInput if train is missing, if other classes are beside them, or if they hold none.
    """
    found = parts_of_classes(class_names)
    if not found:
        return None
    parts = [name.partition("/") for name in class_names]
    remedy = propose_parts(location, found)
    named = ", ".join(sorted(found, key=lambda folder: (_ORDER.index(found[folder]), folder)))
    if "train" not in found.values():
        raise InvalidInput(
            f"the folders {named} look like splits, but there is no train", remedy=remedy
        )
    if not any(slash for _, slash, _ in parts):
        raise InvalidInput(
            f"the folders {named} are parts of a data set, and images in them have no class",
            remedy="put them into one sub-folder per class within each part",
        )
    other = next(("".join(part) for part in parts if not part[1] or part[0] not in found), None)
    if other is not None:
        raise InvalidInput(
            f"the folders {named} look like splits, but {other} stands beside them", remedy=remedy
        )
    part_of = np.array([found[first] for first, _, _ in parts])
    tested = "test" if "test" in found.values() else "val"
    test = part_of == tested
    folders = (
        " and ".join(sorted(folder for folder, part in found.items() if part != tested)),
        " and ".join(sorted(folder for folder, part in found.items() if part == tested)),
    )
    return Split(part_of == "train", (part_of == "val") & ~test, test, folders), [
        name for _, _, name in parts
    ]


def key_split(keys: Sequence[SampleKey]) -> Split | None:
    """Returns the split that the first folders of samples make, whatever their classes are."""
    found = folder_split(keys)
    return None if found is None else found[0]


def split_digest(
    keys: Sequence[SampleKey], class_names: Sequence[str], test: NDArray[np.bool_]
) -> str:
    """Returns the SHA-256 over key, class and part (known or test) of every sample.

    Two results with the same one can be compared. A validation part follows from these by
    VALIDATION_FRACTION.
    """
    sha256 = hashlib.sha256()
    for key, class_name, is_test in sorted(zip(keys, class_names, test.tolist(), strict=True)):
        sha256.update(f"{key}\0{class_name}\0{'test' if is_test else 'known'}\n".encode())
    return sha256.hexdigest()


def check_several_classes(class_names: Sequence[str]) -> None:
    """Raises InvalidInput if there are fewer than two classes."""
    if len(set(class_names)) == 1:
        raise InvalidInput(
            f"all {len(class_names)} images are of one class, {class_names[0]}",
            remedy="give at least two classes",
        )


def check_tested_classes(class_names: Sequence[str], split: Split) -> None:
    """Raises InvalidInput if a tested class is not a known one, so that it could only be wrong."""
    known, tested = (
        {name for name, inside in zip(class_names, mask.tolist(), strict=True) if inside}
        for mask in (split.known, split.test)
    )
    if missing := sorted(tested - known):
        raise InvalidInput(
            f"class {missing[0]} is tested on, but no image to train on has it ({len(missing)} "
            "such classes)",
            remedy="are the folders of both sides one per class, with the same names?",
        )


def check_probe_split(class_names: Sequence[str], split: Split) -> None:
    """Raises InvalidInput if a linear probe cannot be trained, chosen or tested."""
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
