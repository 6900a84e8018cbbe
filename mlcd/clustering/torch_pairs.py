"""The scores of single pairs of a row and a center, by torch: products of a sparse pattern.

This module is imported only where torch is installed; the labels are the same without it.

Shapes: B rows of a batch, K centers, D dimension.
"""

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def pair_scores(
    z_BD: NDArray[Any],
    centers: NDArray[Any],
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
) -> NDArray[Any]:
    """Returns the score of each pair of a row, in ascending order, and a center, in the type of the
    vectors: half the work of numpy's, as nothing is copied.
    """
    if len(rows) == 0:
        return np.empty(0, dtype=z_BD.dtype)
    z = torch.from_numpy(z_BD)
    pairs = _pairs(rows, columns, (len(z_BD), len(centers)), z.dtype)
    found = torch.sparse.sampled_addmm(pairs, z, torch.from_numpy(centers).T, beta=0)
    scores: NDArray[Any] = found.values().numpy()
    return scores


def _pairs(
    rows: NDArray[np.int64], columns: NDArray[np.int64], shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Returns the sparse matrix that has an entry for each pair."""
    firsts = np.zeros(shape[0] + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=shape[0]), out=firsts[1:])
    return torch.sparse_csr_tensor(
        torch.from_numpy(firsts),
        torch.from_numpy(columns),
        torch.zeros(len(columns), dtype=dtype),
        size=shape,
        check_invariants=False,
    )


# torch warns once that sparse matrices are new to it, and of arrays that must not be written to
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _pairs(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), (1, 1), torch.float32)
    torch.from_numpy(np.broadcast_to(np.float32(0), (1,)))
