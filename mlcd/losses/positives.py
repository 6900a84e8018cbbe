"""The classes that a sample belongs to, checked, and each of them once."""

import torch
from torch import Tensor

from mlcd.errors import InvalidInput


def check_labels(labels: Tensor, num_classes: int) -> None:
    """Raises InvalidInput naming sample and value for a label outside [-1, num_classes), and for
    another dtype than int64: float32 labels are exact only below 2^24 classes.

    labels: [B, L], in the host's memory, because the result is read.
    """
    if labels.dtype != torch.int64 or labels.dim() != 2:
        raise InvalidInput(
            f"labels must be int64 [samples, labels], got {labels.dtype} {list(labels.shape)}"
        )
    wrong = (labels < -1) | (labels >= num_classes)
    if bool(wrong.any()):
        sample, column = (int(index) for index in wrong.nonzero()[0])
        raise InvalidInput(
            f"sample {sample} has label {int(labels[sample, column])}, "
            f"outside the {num_classes} classes",
            remedy="were the labels made with these centers?",
        )


def distinct_labels(labels: Tensor) -> Tensor:
    """Returns the labels with later duplicates of a row replaced by -1; the others keep their
    columns, best first.

    labels: int64 [B, L] of class ids, -1 for none.
    """
    ordered, columns = labels.sort(dim=1, stable=True)
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return labels.masked_fill(torch.zeros_like(repeated).scatter_(1, columns, repeated), -1)


def num_distinct(labels: Tensor) -> Tensor:
    """Returns the number of distinct labels, -1 aside, without a result of unknown size."""
    ordered = torch.cat([labels.new_full((1,), -1), labels.flatten()]).sort().values
    return ((ordered[1:] != ordered[:-1]) & (ordered[1:] >= 0)).sum()
