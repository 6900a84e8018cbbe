"""The model in Triton's python backend that runs model.onnx, for servers without an ONNX backend.

`mlcd export --format triton --backend python` copies this file as model.py. It runs in the server's
own environment, where numpy may be too old for mlcd, so it imports only numpy, openvino and
Triton's own module.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import triton_python_backend_utils as triton


class TritonPythonModel:
    """A model from images or token ids to unit rows, float32 [N, D], computed by OpenVINO on the
    CPU.
    """

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self._input = config["input"][0]["name"]
        parameters = config["parameters"]
        hints = {"fp32": ov.Type.f32, "bf16": ov.Type.bf16}
        settings = {
            "INFERENCE_PRECISION_HINT": hints[parameters["precision"]["string_value"]],
            "INFERENCE_NUM_THREADS": int(parameters["num_threads"]["string_value"]),
            "PERFORMANCE_HINT": "LATENCY",  # one stream on all threads, because Triton batches
        }
        graph = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        # The core must outlive its compiled model.
        self._core = ov.Core()
        self._request = self._core.compile_model(graph, "CPU", settings).create_infer_request()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Runs one inference for all requests of Triton's batch that were not cancelled."""
        is_active = [not request.is_cancelled() for request in requests]
        batches = [
            triton.get_input_tensor_by_name(request, self._input).as_numpy()
            for request, active in zip(requests, is_active, strict=True)
            if active
        ]
        rows = iter(self._embed(batches))
        return [
            next(rows) if active else _failure("the request was cancelled") for active in is_active
        ]

    def _embed(self, batches: list[Any]) -> list[Any]:
        if not batches:
            return []
        try:
            # A copy, because the next inference overwrites the request's output.
            rows = self._request.infer([np.concatenate(batches)], share_inputs=True)[0].copy()
        except RuntimeError:
            return [_failure("the inference failed") for _ in batches]
        parts = np.split(rows, np.cumsum([len(part) for part in batches])[:-1])
        return [triton.InferenceResponse([triton.Tensor("embedding", part)]) for part in parts]


def _failure(message: str) -> Any:
    return triton.InferenceResponse(error=triton.TritonError(message))
