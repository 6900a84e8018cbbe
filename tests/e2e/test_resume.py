"""kill -9 and Ctrl-C at any moment of the demo: run again, it ends with the same bytes."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from mlcd.demo import free_port as free_or_none
from tests.conftest import call_demo, call_mlcd, free_port, run_python, start_mlcd, succeed

DIGESTED = (
    "features",
    "centers",
    "labels",
    "run",
    "model",
    "embeddings",
    "collections/demo/index/00000001",
)


def digests(out):
    return {
        name: json.loads((out / name / "manifest.json").read_text())["digest"] for name in DIGESTED
    }


def demo(digits, tiny_recipe, out):
    options = ["--features", "hog", "--recipe", tiny_recipe, "--out", out, "--no-serve"]
    return ["demo", "--images", digits, *options]


def kill_session(process):
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(folder.name)) == process.pid:
                os.kill(int(folder.name), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_resumes_and_ends_with_the_same_digests(
    journey, digits, tiny_recipe, tmp_path, number
):
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
            kill_session(process) if number == signal.SIGKILL else process.send_signal(number)
            process.communicate(timeout=60)
            assert process.returncode == (-9 if number == signal.SIGKILL else 130)
    call_demo(*demo(digits, tiny_recipe, out)[1:])
    assert digests(out) == digests(journey)
    assert not list(out.rglob("*.partial"))


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_the_demo_and_its_step_end_by_one_signal(digits, tiny_recipe, tmp_path, number):
    process = start_mlcd(*demo(digits, tiny_recipe, tmp_path / "demo"), start_new_session=True)
    next(line for line in process.stdout if line.startswith("$ mlcd train"))
    time.sleep(2)
    process.send_signal(number)
    output, _ = process.communicate(
        timeout=20
    )  # the step's end too, which has the same standard output
    assert (process.returncode, "Traceback" in output) == (130, False)
    assert "trained " not in output  # the step was told, and not waited for
    assert output.endswith("mlcd: interrupted; run the same command again to resume\n")


def test_ctrl_c_while_modules_are_imported_leaves_no_traceback():
    program = """
import signal, sys
from mlcd.__main__ import main

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
main()
"""
    result = run_python(program, check=False)
    assert (result.returncode, result.stderr) == (-signal.SIGINT, "")


def test_two_at_once_do_not_disturb_each_other(digits, tiny_recipe, tmp_path):
    command = ["embed", digits, tmp_path / "out", "--model", "hog"]
    processes = [start_mlcd(*command) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    codes = sorted(process.returncode for process in processes)
    assert codes[0] == 0
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0 or "another process is writing" in output
    succeed("verify", tmp_path / "out")


@pytest.mark.slow
def test_a_port_in_use_is_told_before_the_work_and_the_printed_curl_line_asks_on_a_free_one(
    journey, digits, tiny_recipe
):
    assert free_or_none("127.0.0.1", port := free_port()) == port
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = [*demo(digits, tiny_recipe, journey)[:-1], "--port", port]
        process = start_mlcd(*command, start_new_session=True)
        try:
            first = process.stdout.readline()
            served = next(line for line in process.stdout if line.startswith("serving"))
            beside = next(line for line in process.stdout if line.startswith("the features (hog):"))
            found = httpx.get(f"{beside.split()[-1]}v1/info").json()["model"]
            curl = next(line for line in process.stdout if line.strip().startswith("curl"))
            answer = subprocess.run(
                curl.strip(), shell=True, capture_output=True, text=True, check=True
            )
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    assert first == f"mlcd: port {port} is in use: the service will use a free port, and print it\n"
    assert int(served.rpartition(":")[2]) not in (0, port)
    assert json.loads(answer.stdout)["results"][0]["labels"]
    assert found == "hog"
    assert process.returncode == 0


def test_a_crash_inside_a_checkpoint_does_not_stop_the_run_for_ever(
    journey, digits, tiny_recipe, tmp_path
):
    """kill -9 after the nested centers are published and before the checkpoint is."""
    code = """
import os, sys
from mlcd.training.head.classifier_contents import ClassifierContents
original = ClassifierContents._write_centers
def die(self, snapshot, *rest):
    original(self, snapshot, *rest)
    if snapshot.step == 10:
        os.kill(os.getpid(), 9)
ClassifierContents._write_centers = die
from mlcd.cli import main
main()
"""
    places = [
        f"data.images={digits}",
        f"data.labels={journey / 'labels'}",
        f"out={tmp_path / 'run'}",
    ]
    arguments = ["train", str(tiny_recipe), *places]
    died = run_python(code, *arguments, check=False)
    assert died.returncode == -signal.SIGKILL
    assert (tmp_path / "run.partial" / "checkpoints" / "step_000010.partial" / "centers").is_dir()
    # A mistake on resume must not cost the checkpoints: files of the same names and sizes, but no
    # images.
    junk = tmp_path / "junk"
    for path in digits.rglob("*.png"):
        (junk / path.parent.name).mkdir(parents=True, exist_ok=True)
        (junk / path.parent.name / path.name).write_bytes(bytes(path.stat().st_size))
    assert "can be read" in call_mlcd(*arguments, f"data.images={junk}").stderr
    assert (tmp_path / "run.partial" / "checkpoints" / "step_000000").is_dir()
    succeed(*arguments)
