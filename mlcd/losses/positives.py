"""Checks the labels of samples and removes duplicates."""

import torch
from torch import Tensor

from mlcd.errors import InvalidInput


def check_labels(labels: Tensor, num_classes: int) -> None:
    """Raises InvalidInput, naming sample and label, for a label outside [-1, num_classes), and for
    a dtype other than int64: float32 labels are exact only below 2^24 classes.

    labels: [B, L] in host memory; on a GPU the check would wait for the device.
    """
    if labels.dtype != torch.int64 or labels.dim() != 2:
        raise InvalidInput(
            f"labels must be int64 [samples, labels], got {labels.dtype} {list(labels.shape)}"
        )
    is_invalid = (labels < -1) | (labels >= num_classes)
    if bool(is_invalid.any()):
        sample, column = (int(index) for index in is_invalid.nonzero()[0])
        raise InvalidInput(
            f"labels must be -1 or in [0, {num_classes}), got {int(labels[sample, column])}"
            f" for sample {sample}",
            remedy="check that the labels were made with these centers",
        )


def distinct_labels(labels: Tensor) -> Tensor:
    """Returns the labels with repeated labels of a row replaced by -1; the first occurrence keeps
    its column.

    labels: int64 [B, L] of class ids, best first; -1 is padding.
    """
    ordered, columns = labels.sort(dim=1, stable=True)
    is_repeat = torch.zeros_like(ordered, dtype=torch.bool)
    is_repeat[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return labels.masked_fill(torch.zeros_like(is_repeat).scatter_(1, columns, is_repeat), -1)


def num_distinct(labels: Tensor) -> Tensor:
    """Returns the number of distinct labels other than -1, as a scalar tensor. Unlike torch.unique
    it does not wait for the GPU.
    """
    ordered = torch.cat([labels.new_full((1,), -1), labels.flatten()]).sort().values
    return ((ordered[1:] != ordered[:-1]) & (ordered[1:] >= 0)).sum()
