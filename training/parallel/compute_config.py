"""The settings of precision, memory and sharding."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mlcd.training.section import Section

Precision = Literal["fp32", "bf16", "fp64"]

Gathered = Literal["fp32", "bf16"]

Products = Literal["fp32", "tf32", "bf16"]


class ComputeConfig(Section):
    """The way a step is computed; it changes results by no more than rounding."""

    precision: Precision = "fp32"
    """bf16: the backbone runs under autocast. fp64 is for tests of exactness."""
    head_products: Products = "fp32"
    """The matrix products of the head's negatives. tf32 (on a GPU) and bf16 shorten their inputs
    to 11 and 8 significant bits and sum in float32; docs/explanation/head.md states the error.
    """
    accumulation: Annotated[int, Field(ge=1)] = 1
    """Micro-batches that each step's batch is split into, to save memory."""
    recompute: bool = False
    """Computes activations inside blocks again in the backward pass (gradient checkpointing)."""
    compile: bool = False
    """Compiles every block with torch.compile."""
    deterministic: bool | None = None
    """Uses only algorithms that give the same bits each time. None: on the CPU. On a GPU some are
    slow, and a step that has none is refused.
    """
    backbone: Literal["ddp", "fsdp"] = "ddp"
    """fsdp: shards the backbone's weights and moments over processes."""
    gathered: Gathered = "fp32"
    """The type in which fsdp gathers the blocks' weights; bf16 halves that traffic. Sums and
    updates stay in float32.
    """

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        if self.gathered == "bf16" and (self.backbone, self.precision) != ("fsdp", "bf16"):
            raise ValueError(
                "compute.gathered=bf16 is for compute.backbone=fsdp with compute.precision=bf16"
            )
        if self.precision == "fp64" and self.head_products != "fp32":
            raise ValueError(
                f"compute.head_products={self.head_products} is not exact, and "
                "compute.precision=fp64 is for tests of exactness"
            )
        return self
