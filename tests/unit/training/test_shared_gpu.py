"""Two processes with one GPU between them, as torchrun starts them."""

import json

import pytest
import torch
import torch.distributed as dist

from mlcd.world import open_world, own_gpu
from tests.ranks import call_together

GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    ],
)


@pytest.mark.parametrize(
    ("num_gpus", "rank", "gpu", "backend", "num_warnings"),
    [
        (1, 0, 0, "cpu:gloo,cuda:gloo", 1),
        (1, 1, 0, "cpu:gloo,cuda:gloo", 0),
        (2, 1, 1, "cpu:gloo,cuda:nccl", 0),
        (3, 1, 1, "cpu:gloo,cuda:nccl", 0),
    ],
)
def test_nccl_is_for_processes_with_a_gpu_each(
    num_gpus, rank, gpu, backend, num_warnings, monkeypatch, caplog
):
    calls = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: calls.append(name))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    variables = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    with open_world(cuda=True):
        assert own_gpu() == gpu
    assert calls == [gpu, backend]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == num_warnings
    assert all("2 processes share 1 GPU, which NCCL refuses" in text for text in warnings)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_two_processes_take_the_steps_of_one(device, labeled, digits, tiny_recipe, tmp_path):
    losses = {}
    for size in (1, 2):
        run = tmp_path / f"run-{size}"
        places = (f"data.images={digits}", f"data.labels={labeled / 'labels'}", f"out={run}")
        options = (f"device={device}", "schedule.steps=6", "log_every=1", "data.workers=1")
        result = call_together(
            size, "train", tiny_recipe, *places, *options, "telemetry.peak_tflops=1"
        )
        assert result.returncode == 0, result.stderr
        lines = (run / "metrics.jsonl").read_text().splitlines()
        losses[size] = [json.loads(line)["loss"] for line in lines]
        # two GPUs would have one for each process
        shared = device == "cuda" and torch.cuda.device_count() < size
        assert result.stderr.count("which NCCL refuses") == shared
    assert len(losses[1]) == 6
    assert losses[2] == pytest.approx(losses[1], rel=1e-3 if device == "cuda" else 1e-5)
