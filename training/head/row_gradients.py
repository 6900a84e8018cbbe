"""Sparse gradients of rows: sums the entries of each row without waiting for a GPU.

A sparse gradient may have several entries of a row. `torch.Tensor.coalesce` leaves one entry per
row, but the host waits until the GPU has counted the rows. Here the result's size follows from the
number of entries; unused entries repeat the last row with zeros, which does not change the
gradient.
"""

import torch
from torch import Tensor


def distinct_rows(rows: Tensor, max_distinct: int) -> tuple[Tensor, Tensor]:
    """Returns the distinct rows, ascending, and the index of each of `rows` in them.

    The distinct rows are padded with the last one to size min(max_distinct, len(rows)).
    max_distinct: an upper bound of their number.
    """
    ordered, order = rows.sort()
    is_new = torch.zeros_like(ordered)
    is_new[1:] = ordered[1:] != ordered[:-1]
    ranks = is_new.cumsum(0)
    distinct = ordered[-1:].repeat(min(max_distinct, len(rows))).scatter_(0, ranks, ordered)
    return distinct, torch.empty_like(ranks).scatter_(0, order, ranks)


def sum_duplicate_rows(parameter: Tensor) -> None:
    """Sums the entries of each row in the parameter's gradient, if the gradient is sparse.

    Rows are then ascending, and each row's further entries after the first are zero.
    """
    gradient = parameter.grad
    if gradient is None or not gradient.is_sparse:
        return
    rows, values = entries(gradient)
    distinct, indices = distinct_rows(rows, len(parameter))
    summed = values.new_zeros((len(distinct), *values.shape[1:])).index_add_(0, indices, values)
    parameter.grad = sparse_rows(distinct, summed, parameter.shape)


def entries(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows [n] and values [n, D] of a sparse gradient as they are stored."""
    # indices() and values() refuse a tensor that is not marked as coalesced.
    return gradient._indices()[0], gradient._values()  # noqa: SLF001


def sparse_rows(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Returns the sparse gradient with these entries, without validating them."""
    # With check_invariants=False alone, PyTorch 2.11 warns that nothing is checked.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        gradient: Tensor = torch.sparse_coo_tensor(
            rows[None], values, shape, check_invariants=False
        )
    return gradient
