"""The settings of precision, memory and sharding."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mlcd.training.section import Section

Precision = Literal["fp32", "bf16", "fp64"]

Gathered = Literal["fp32", "bf16"]

Products = Literal["fp32", "tf32", "bf16"]


class ComputeConfig(Section):
    """How a step is computed; the settings change results by no more than rounding."""

    precision: Precision = "fp32"
    """bf16: the backbone runs under autocast. fp64 is for tests of exactness."""
    head_products: Products = "fp32"
    """The matrix products of the head's negatives. tf32 (on a GPU) and bf16 round the inputs to 11
    and 8 significant bits and sum in float32; docs/explanation/head.md states the error.
    """
    accumulation: Annotated[int, Field(ge=1)] = 1
    """The number of micro-batches that each step's batch is split into, to save memory."""
    recompute: bool = False
    """Recomputes activations inside blocks in the backward pass (gradient checkpointing)."""
    compile: bool = False
    """Compiles every block with torch.compile."""
    deterministic: bool | None = None
    """Uses only deterministic algorithms (the same bits each time). None: true on the CPU. On a GPU
    some are slow, and an operation without a deterministic algorithm is an error.
    """
    backbone: Literal["ddp", "fsdp"] = "ddp"
    """fsdp: shards the backbone's weights and moments over processes."""
    gathered: Gathered = "fp32"
    """The dtype in which fsdp gathers the blocks' weights; bf16 halves the traffic. Sums and
    updates stay in float32.
    """

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        if self.gathered == "bf16" and (self.backbone, self.precision) != ("fsdp", "bf16"):
            raise ValueError(
                "compute.gathered=bf16 requires compute.backbone=fsdp and compute.precision=bf16"
            )
        if self.precision == "fp64" and self.head_products != "fp32":
            raise ValueError(
                "compute.precision=fp64 requires compute.head_products=fp32, got "
                f"{self.head_products}"
            )
        return self
