"""The settings of a run's records."""

from typing import Annotated

from pydantic import Field

from mlcd.training.section import Section


class TelemetryConfig(Section):
    """The records that a run writes besides metrics.jsonl."""

    tensorboard: bool = False
    """Also writes events for TensorBoard (requires the tensorboard package)."""
    keys: bool = False
    """Also logs the keys of each step's samples, in keys-RANK.jsonl."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """The peak matrix throughput of one device in TFLOP/s, for MFU. None: measured at the start."""
