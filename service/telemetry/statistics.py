"""The statistics of the served model in Triton's format, made from the metrics.

They count since the server started. Nothing is estimated: a duration that the service does not
measure has the count 0.
"""

from typing import Any, Final

from prometheus_client import CollectorRegistry

_MILLISECONDS: Final = 1_000
_NANOSECONDS: Final = 1_000_000_000
_NOT_MEASURED: Final = {"count": 0, "ns": 0}


def inference_statistics(counted: CollectorRegistry) -> dict[str, Any]:
    """Returns one model's statistics without its name and version.

    counted: the result of `Metrics.counted`.
    """
    totals = _Totals(counted)
    executions = round(totals.of("mlcd_inference_duration_seconds_count"))
    batches = round(totals.of("mlcd_batch_size_count"))
    return {
        "last_inference": round(_MILLISECONDS * totals.of("mlcd_last_inference_timestamp_seconds")),
        # An engine that makes its own batches gets one image at a time.
        "inference_count": round(totals.of("mlcd_batch_size_sum")) + executions - batches,
        "execution_count": executions,
        "inference_stats": {
            "success": totals.duration("mlcd_inference_request_seconds", outcome="success"),
            "fail": totals.duration("mlcd_inference_request_seconds", outcome="fail"),
            "queue": totals.duration("mlcd_inference_stage_seconds", stage="queue"),
            "compute_input": totals.duration("mlcd_inference_stage_seconds", stage="decode"),
            "compute_infer": totals.duration("mlcd_inference_stage_seconds", stage="inference"),
            "compute_output": _NOT_MEASURED,
            "cache_hit": _NOT_MEASURED,
            "cache_miss": _NOT_MEASURED,
        },
        "batch_stats": [],
    }


class _Totals:
    """One reading of all samples."""

    def __init__(self, counted: CollectorRegistry) -> None:
        self._samples = [sample for family in counted.collect() for sample in family.samples]

    def of(self, name: str, **labels: str) -> float:
        """Returns the sum over all labels that are not given."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def duration(self, name: str, **labels: str) -> dict[str, int]:
        """Returns the number of measurements and their sum."""
        seconds = self.of(f"{name}_sum", **labels)
        return {
            "count": round(self.of(f"{name}_count", **labels)),
            "ns": round(_NANOSECONDS * seconds),
        }
