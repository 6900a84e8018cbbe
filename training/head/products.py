"""The matrix products of the head: in the tensors' dtype, or faster with rounded inputs.

tf32 and bf16 round the inputs to 11 and 8 significant bits; products are summed in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mlcd.training.parallel.compute_config import Products


def product(left_factor: Tensor, right_factor: Tensor, kind: Products) -> Tensor:
    """Returns left_factor @ right_factor in the dtype of `left_factor`."""
    if kind == "bf16":
        return _multiply_bf16(left_factor.bfloat16(), right_factor.bfloat16())
    with _tf32(enabled=kind == "tf32"):
        return left_factor @ right_factor


def add_product(total: Tensor, left_factor: Tensor, right_factor: Tensor, kind: Products) -> None:
    """Adds left_factor @ right_factor to `total` in place."""
    if kind == "bf16":
        total.add_(_multiply_bf16(left_factor.bfloat16(), right_factor.bfloat16()))
        return
    with _tf32(enabled=kind == "tf32"):
        total.addmm_(left_factor, right_factor)


def _multiply_bf16(left_factor: Tensor, right_factor: Tensor) -> Tensor:
    if left_factor.is_cuda:
        result: Tensor = torch.mm(left_factor, right_factor, out_dtype=torch.float32)
        return result
    # The product of two bfloat16 numbers is exact in float32.
    return left_factor.float() @ right_factor.float()


@contextmanager
def _tf32(*, enabled: bool) -> Iterator[None]:
    """Lets CUDA round float32 inputs to TF32 inside this block."""
    if not enabled:
        yield
        return
    previous = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = previous
