"""The matrix products of the head: in the type of the tensors, or faster on shortened inputs.

tf32 and bf16 shorten the inputs to 11 and 8 significant bits; products are summed in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mlcd.training.parallel.compute_config import Products


def product(left_factor: Tensor, right_factor: Tensor, kind: Products) -> Tensor:
    """Returns left_factor @ right_factor in the type of `left_factor`."""
    if kind == "bf16":
        return _of_bf16(left_factor.bfloat16(), right_factor.bfloat16())
    with _tf32(enabled=kind == "tf32"):
        return left_factor @ right_factor


def add_product(total: Tensor, left_factor: Tensor, right_factor: Tensor, kind: Products) -> None:
    """Adds left_factor @ right_factor to `total` in place."""
    if kind == "bf16":
        total.add_(_of_bf16(left_factor.bfloat16(), right_factor.bfloat16()))
        return
    with _tf32(enabled=kind == "tf32"):
        total.addmm_(left_factor, right_factor)


def _of_bf16(left_factor: Tensor, right_factor: Tensor) -> Tensor:
    if left_factor.is_cuda:
        wide: Tensor = torch.mm(left_factor, right_factor, out_dtype=torch.float32)
        return wide
    # The product of two bfloat16 numbers is exact in float32.
    return left_factor.float() @ right_factor.float()


@contextmanager
def _tf32(*, enabled: bool) -> Iterator[None]:
    """Lets CUDA shorten float32 inputs to TF32, in this block alone."""
    if not enabled:
        yield
        return
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
