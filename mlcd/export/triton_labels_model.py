"""The label model in Triton's python backend: embeddings to their nearest centers.

`mlcd export --format triton --centers` copies this file as model.py, with the modules of mlcd's
exact scan beside it. It runs in the server's own environment, which needs numpy, and PyTorch for a
GPU.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as triton


class TritonPythonModel:
    """A model from float32 embeddings [N, D] to the L nearest centers, best first: int32 ids and
    float64 similarities, each [N, L].
    """

    def initialize(self, args: dict[str, str]) -> None:
        folder = Path(args["model_repository"]) / args["model_version"]
        on_gpu = args["model_instance_kind"] == "GPU"
        if on_gpu:
            # before torch is imported; setting the current device would not reach other threads
            os.environ["CUDA_VISIBLE_DEVICES"] = args["model_instance_device_id"]  # noqa: TID251 - a separate process
        sys.path.insert(0, str(folder / "scan"))
        from mlcd.clustering.nearest import CenterScan
        from mlcd.encoders.unit_rows import unit_or_zero
        from mlcd.types import unit_rows

        self._unit_or_zero, self._unit_rows = unit_or_zero, unit_rows
        config = json.loads(args["model_config"])
        dims = {output["name"]: output["dims"] for output in config["output"]}
        self._top = int(dims["ids"][0])
        mean = folder / "mean.npy"
        self._mean = np.load(mean, allow_pickle=False) if mean.is_file() else None
        centers = np.load(folder / "vectors.npy", allow_pickle=False)
        # all matmul backends return the same centers
        self._scan = CenterScan(centers, matmul="cuda-bf16" if on_gpu else "numpy")

    def execute(self, requests: list[Any]) -> list[Any]:
        """Runs one scan for all requests of Triton's batch that were not cancelled."""
        is_active = [not request.is_cancelled() for request in requests]
        batches = [
            triton.get_input_tensor_by_name(request, "embedding").as_numpy()
            for request, active in zip(requests, is_active, strict=True)
            if active
        ]
        answers = iter(self._label(batches))
        return [
            next(answers) if active else _failure("the request was cancelled")
            for active in is_active
        ]

    def _label(self, batches: list[Any]) -> list[Any]:
        if not batches:
            return []
        try:
            ids, similarities = self._nearest(np.concatenate(batches))
        except Exception as error:  # noqa: BLE001 - Triton would unload the model
            triton.Logger.log_error(f"the look-up of centers failed: {error}")
            return [_failure("the look-up of centers failed") for _ in batches]
        ends = np.cumsum([len(part) for part in batches])[:-1]
        return [
            triton.InferenceResponse(
                [triton.Tensor("ids", part), triton.Tensor("similarity", scores)]
            )
            for part, scores in zip(np.split(ids, ends), np.split(similarities, ends), strict=True)
        ]

    def _nearest(self, embeddings: Any) -> tuple[Any, Any]:
        # the mlcd server normalizes encoder output in the same way
        rows = self._unit_or_zero(embeddings)
        if self._mean is not None:
            rows = self._unit_rows(rows - self._mean)
        ids, scores, _ = self._scan.search(rows, self._top)
        return ids.astype(np.int32), scores


def _failure(message: str) -> Any:
    return triton.InferenceResponse(error=triton.TritonError(message))
