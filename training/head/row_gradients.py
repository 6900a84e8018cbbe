"""Gradients of some rows of a parameter, added up by row without a result of unknown size.

A sparse gradient may hold several entries of a row. `torch.Tensor.coalesce` makes one of each, and
the host waits until a GPU has counted the rows. Here the size follows from that of the entries, and
what is left over repeats the last row, with zeros: still a sparse gradient of the same value.
"""

import torch
from torch import Tensor


def distinct_rows(rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Returns (distinct, places): the distinct ones of `rows` ascending, the last one repeated to
    the end, and the place of each of `rows` among them.

    most: a number that the distinct ones do not exceed; there are as many as it or `rows`.
    """
    ordered, order = rows.sort()
    is_new = torch.zeros_like(ordered)
    is_new[1:] = ordered[1:] != ordered[:-1]
    ranks = is_new.cumsum(0)
    distinct = ordered[-1:].repeat(min(most, len(rows))).scatter_(0, ranks, ordered)
    return distinct, torch.empty_like(ranks).scatter_(0, order, ranks)


def add_up(parameter: Tensor) -> None:
    """Adds up the entries of each row in the parameter's gradient, if it is sparse.

    Its rows then ascend, and entries behind the first of a row are zero.
    """
    gradient = parameter.grad
    if gradient is None or not gradient.is_sparse:
        return
    rows, values = entries(gradient)
    distinct, places = distinct_rows(rows, len(parameter))
    summed = values.new_zeros((len(distinct), *values.shape[1:])).index_add_(0, places, values)
    parameter.grad = sparse_rows(distinct, summed, parameter.shape)


def entries(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows [n] and values [n, D] of a sparse gradient as they are stored."""
    # indices() and values() refuse a tensor that may have several entries of a row.
    return gradient._indices()[0], gradient._values()  # noqa: SLF001


def sparse_rows(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Returns the sparse gradient of these entries, which nobody checks."""
    # The argument alone leaves PyTorch 2.11 with a warning that nothing is checked.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        gradient: Tensor = torch.sparse_coo_tensor(
            rows[None], values, shape, check_invariants=False
        )
    return gradient
