"""The matrix products of the head: in the type of the tensors, or faster on shortened inputs.

tf32 and bf16 shorten the inputs to 11 and 8 significant bits; products are summed in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from training.parallel.compute_config import Products


def product(one: Tensor, other: Tensor, kind: Products) -> Tensor:
    """Returns one @ other in the type of `one`."""
    if kind == "bf16":
        return _of_bf16(one.bfloat16(), other.bfloat16())
    with _tf32(enabled=kind == "tf32"):
        return one @ other


def add_product(total: Tensor, one: Tensor, other: Tensor, kind: Products) -> None:
    """Adds one @ other to `total` in place."""
    if kind == "bf16":
        total.add_(_of_bf16(one.bfloat16(), other.bfloat16()))
        return
    with _tf32(enabled=kind == "tf32"):
        total.addmm_(one, other)


def _of_bf16(one: Tensor, other: Tensor) -> Tensor:
    if one.is_cuda:
        wide: Tensor = torch.mm(one, other, out_dtype=torch.float32)
        return wide
    # The product of two bfloat16 numbers is exact in float32.
    return one.float() @ other.float()


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
