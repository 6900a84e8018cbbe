"""kill -9 and Ctrl-C at any moment of the demo: run again, it ends with the same bytes."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import run_mlcd, start_mlcd

DIGESTED = ("features", "centers", "labels", "run", "model", "embeddings", "collections/demo")


def digests(out):
    return {name: json.loads((out / name / "manifest.json").read_text())["digest"] for name in DIGESTED}


def demo(digits, tiny_recipe, out):
    return ["demo", "--images", digits, "--recipe", tiny_recipe, "--out", out, "--no-serve"]


def kill_group(process, number):
    os.killpg(process.pid, number)
    process.communicate(timeout=60)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_demo_resumes_and_ends_with_the_same_digests(journey, digits, tiny_recipe, tmp_path, number):
    out = tmp_path / "demo"
    generator = random.Random(0)
    # Wait for a step to begin, then strike at a random moment of it.
    for step in ("embed", "cluster", "train", "export"):
        process = start_mlcd(*demo(digits, tiny_recipe, out), start_new_session=True)
        for line in process.stdout:
            if line.startswith(f"$ mlcd {step}"):
                break
        time.sleep(generator.uniform(0.0, 3.0))
        if process.poll() is None:
            kill_group(process, number)
            assert process.returncode == (-9 if number == signal.SIGKILL else 130)
    result = run_mlcd(*demo(digits, tiny_recipe, out))
    assert result.returncode == 0, result.stderr
    assert digests(out) == digests(journey)
    assert not list(out.rglob("*.partial"))


def test_a_training_killed_between_checkpoints_ends_with_the_same_weights(journey, digits, tiny_recipe, tmp_path):
    def train(out):
        places = [f"data.images={digits}", f"data.labels={journey / 'labels'}", f"out={out}"]
        return ["train", tiny_recipe, *places, "schedule.steps=120", "log_every=1"]

    assert run_mlcd(*train(tmp_path / "whole")).returncode == 0
    out = tmp_path / "parts"
    metrics = tmp_path / "parts.partial" / "metrics.jsonl"
    for until in (23, 57, 98):
        process = start_mlcd(*train(out), start_new_session=True)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if metrics.is_file() and metrics.read_text().count("\n") >= until:
                break
            time.sleep(0.005)
        kill_group(process, signal.SIGKILL)
        assert not out.exists()
    assert run_mlcd("train", "--resume", out).returncode == 0
    assert (
        json.loads((out / "manifest.json").read_text())["digest"]
        == json.loads((tmp_path / "whole" / "manifest.json").read_text())["digest"]
    )
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 121))


def test_two_at_once_do_not_disturb_each_other(digits, tiny_recipe, tmp_path):
    command = ["embed", digits, tmp_path / "out", "--model", "hog"]
    processes = [start_mlcd(*command) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    codes = sorted(process.returncode for process in processes)
    assert codes[0] == 0
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0 or "another process is writing" in output
    assert run_mlcd("verify", tmp_path / "out").returncode == 0


def test_the_demo_serves_and_the_printed_curl_line_works(journey, digits, tiny_recipe):
    from tests.conftest import free_port

    port = free_port()
    command = [*demo(digits, tiny_recipe, journey)[:-1], "--port", port]
    process = start_mlcd(*command, start_new_session=True)
    try:
        line = next(line for line in process.stdout if line.strip().startswith("curl"))
        answer = subprocess.run(line.strip(), shell=True, capture_output=True, text=True, check=True)
        assert json.loads(answer.stdout)["results"][0]["labels"]
    finally:
        kill_group(process, signal.SIGINT)
    assert process.returncode == 0


def test_a_crash_inside_a_checkpoint_does_not_stop_the_run_for_ever(journey, digits, tiny_recipe, tmp_path):
    """kill -9 after the nested centers are published and before the checkpoint is."""
    code = """
import os, sys
import training.checkpoint.store as store
original = store._tensors
def die(state):
    if state.step == 10:
        os.kill(os.getpid(), 9)
    return original(state)
store._tensors = die
from mlcd.cli import main
main()
"""
    places = [f"data.images={digits}", f"data.labels={journey / 'labels'}", f"out={tmp_path / 'run'}"]
    arguments = ["train", str(tiny_recipe), *places]
    died = subprocess.run([sys.executable, "-c", code, *arguments], check=False, capture_output=True)
    assert died.returncode == -signal.SIGKILL
    assert (tmp_path / "run.partial" / "checkpoints" / "step_000010.partial" / "centers").is_dir()
    # A mistake on resume must not cost the checkpoints.
    assert run_mlcd(*arguments, "data.memory_gib=1e-9").returncode == 2
    assert (tmp_path / "run.partial" / "checkpoints" / "step_000000").is_dir()
    result = run_mlcd(*arguments)
    assert result.returncode == 0, result.stderr
