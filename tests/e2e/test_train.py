"""`mlcd train` by several processes and through interruptions: always the run that one process
would have made.
"""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import call_mlcd, refuse, run_python, start_mlcd, succeed
from tests.ranks import call_together
from tests.unit.training.running import before_step

NUMBERS = (
    "loss",
    "grad_norm",
    "center_grad_norm",
    "positive_cosine",
    "effective_negatives",
    "unique_positives",
)


@pytest.fixture(scope="module")
def labels(digits, tmp_path_factory):
    """Labels of the digits, two among 20 centers each."""
    out = tmp_path_factory.mktemp("labeled")
    for command in (
        ["embed", digits, out / "features", "--model", "pixels"],
        ["cluster", out / "features", out / "centers", "--clusters", 20, "--hold-out", 0.2],
        ["label", out / "features", out / "labels", "--centers", out / "centers", "--top", 2],
    ):
        succeed(*command)
    return out / "labels"


@pytest.fixture
def arguments(labels, digits, tiny_recipe, tmp_path):
    def make(out, *overrides):
        places = [f"data.images={digits}", f"data.labels={labels}", f"out={tmp_path / out}"]
        return [
            "train",
            tiny_recipe,
            *places,
            "log_every=1",
            "telemetry.keys=true",
            "telemetry.peak_tflops=1",
            *overrides,
        ]

    return make


def torchrun(size, *arguments, program=("-m", "mlcd")):
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(size),
    ]
    return [*launcher, *program, *map(str, arguments)]


def start_together(size, *arguments, **options):
    command = torchrun(size, *arguments, **options)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def told_by(process):
    """Returns what it says first; it is a failure where it ends without a word."""
    written = []
    for line in process.stderr:
        written.append(line)
        if line.startswith("mlcd:"):
            return line
    pytest.fail(f"status {process.wait()}: {''.join(written)}")


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def keys_of_steps(run):
    """The keys of each step's whole batch, in order of rank."""
    steps = {}
    for path in sorted(run.glob("keys-*.jsonl")):
        for line in read_lines(path):
            steps.setdefault(line["step"], []).extend(line["keys"])
    return steps


def steps_of(run):
    return [line for line in read_lines(run / "metrics.jsonl") if "loss" in line]


def assert_alike(one, other, *, tolerance):
    ours, theirs = (steps_of(run) for run in (one, other))
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for line, reference in zip(ours, theirs, strict=True):
        for name in NUMBERS:
            assert line[name] == pytest.approx(reference[name], rel=tolerance), (line["step"], name)
    assert keys_of_steps(one) == keys_of_steps(other)


def wait_for_steps(run, number, process):
    metrics = run.with_name(run.name + ".partial") / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.read_text().count("\n") >= number):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def worker_of(launcher, rank):
    """The process that torchrun started as `rank`."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
            variables = (
                (stat.parent / "environ").read_bytes().split(b"\0")
                if parent == launcher.pid
                else []
            )
        except OSError:  # it ended meanwhile
            continue
        if f"RANK={rank}".encode() in variables:
            return int(stat.parent.name)
    raise AssertionError("no such process")


def measured(run):
    """Returns the k-NN accuracies that the run logged while it trained."""
    return [line["knn"] for line in read_lines(run / "metrics.jsonl") if "knn" in line]


@pytest.fixture(scope="module")
def alone(labels, digits, tiny_recipe, tmp_path_factory):
    """The same run by one process."""
    folder = tmp_path_factory.mktemp("alone")

    def run(name, *overrides):
        out = folder / name
        if not out.exists():
            places = [f"data.images={digits}", f"data.labels={labels}", f"out={out}"]
            succeed("train", tiny_recipe, *places, "log_every=1", "telemetry.keys=true", *overrides)
        return out

    return run


def test_a_training_ends_with_the_commands_that_follow_it(arguments, digits, tmp_path):
    command = arguments("o u t", "data.hold_out=0.2", "schedule.steps=6")
    done = succeed(*command)
    assert (tmp_path / "o u t" / "loss.png").is_file()
    evaluate, serve = (shlex.split(line) for line in done.stdout.splitlines()[-2:])
    assert evaluate == ["mlcd", "evaluate", "knn", str(tmp_path / "o u t")]
    succeed(*evaluate[1:])
    assert serve == ["mlcd", "serve", "--model", str(tmp_path / "o u t")]

    # without held-out images there is nothing to classify
    (pca, _) = call_mlcd(
        *arguments("all", "data.hold_out=0", "schedule.steps=6")
    ).stdout.splitlines()[-2:]
    assert shlex.split(pca)[1:3] == ["evaluate", "pca"]
    succeed(*shlex.split(pca)[1:])


def test_two_processes_that_share_the_tower_equal_one_in_float64(arguments, alone, tmp_path):
    """A sharded run, with what it evaluates. The next test but one holds the same of replicas."""
    options = [
        "compute.precision=fp64",
        "evaluation.every_steps=15",
        "evaluation.linear_probe=false",
    ]
    one, two = alone("fp64", *options), tmp_path / "two"
    result = call_together(2, *arguments("two", *options, "compute.backbone=fsdp"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("trained 160 images") == 1
    assert_alike(two, one, tolerance=1e-9)
    assert len(measured(two)) == 2
    assert measured(two) == measured(one)
    succeed("verify", two)


AVERAGED = ["optim.ema=0.95", "optim.layer_decay=0.7", "model.drop_path=0.2", "model.freeze=1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backbone", "more"),
    [("ddp", AVERAGED), ("ddp", []), ("fsdp", []), ("fsdp", AVERAGED)],
)
def test_two_then_one_then_three_processes_go_on_with_one_run(
    arguments, alone, tmp_path, backbone, more
):
    options = [
        *more,
        "compute.precision=fp64",
        "schedule.steps=120",
        "evaluation.every_steps=20",
        "evaluation.linear_probe=false",
    ]
    command = arguments("run", *options, f"compute.backbone={backbone}")
    run = tmp_path / "run"
    process = start_together(2, *command)
    wait_for_steps(run, 15, process)
    os.kill(
        worker_of(process, 1), signal.SIGTERM
    )  # not the first process: it has to tell the other
    told, errors = process.communicate(timeout=120)
    assert (process.returncode, run.exists(), told.count("interrupted at step")) == (0, False, 1), (
        errors
    )
    reached = len(keys_of_steps(tmp_path / "run.partial"))
    process = start_mlcd("train", "--resume", run)
    wait_for_steps(run, reached + 15, process)
    process.send_signal(signal.SIGUSR1)
    told, _ = process.communicate(timeout=120)
    assert (process.returncode, run.exists(), "mlcd train --resume" in told) == (0, False, True)
    result = call_together(3, "train", "--resume", f"{run}.partial")  # as a shell completes it
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("trained 160 images") == 1
    one = alone(f"long-{len(more)}", *options)
    assert_alike(run, one, tolerance=1e-9)
    assert len(measured(run)) == 6
    assert measured(run) == measured(one)
    ours, theirs = (last_weights(each, 120) for each in (run, one))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in theirs)
    succeed("verify", run)


def last_weights(run, step):
    return load_file(run / "checkpoints" / f"step_{step:06d}" / "weights" / "model.safetensors")


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_steps_ends_with_the_same_bytes(arguments, alone, tmp_path, kills):
    options = ["schedule.steps=200", "checkpoint.every_steps=7"]
    whole, run = alone("killed", *options), tmp_path / "run"
    generator = random.Random(kills)
    for until in sorted(generator.sample(range(5, 180), kills)):
        process = start_mlcd(*arguments("run", *options), start_new_session=True)
        wait_for_steps(run, until, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        assert not run.exists()
    succeed("train", "--resume", run)
    digests = [json.loads((path / "manifest.json").read_text())["digest"] for path in (run, whole)]
    assert digests[0] == digests[1]  # of weights, moments, centers, byte for byte
    assert (run / "keys-0.jsonl").read_bytes() == (whole / "keys-0.jsonl").read_bytes()
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == list(range(1, 201))
    assert not list(run.rglob("*.partial"))


def test_images_that_one_process_cannot_read_change_nothing_else(arguments, digits, tmp_path):
    """With one image for each process, an unreadable one leaves a process with nothing to do."""
    images = tmp_path / "images"
    shutil.copytree(digits, images)
    broken = sorted(images.rglob("*.png"))[::5]
    for path in broken:
        path.write_bytes(bytes(path.stat().st_size))
    options = ["compute.precision=fp64", "schedule.batch_size=2", f"data.images={images}"]
    succeed(*arguments("one", *options))
    result = call_together(2, *arguments("two", *options))
    assert result.returncode == 0, result.stderr
    assert_alike(tmp_path / "two", tmp_path / "one", tolerance=1e-9)
    skipped = [
        read_lines(tmp_path / name / "metrics.jsonl")[-1]["skipped_samples"]
        for name in ("one", "two")
    ]
    assert skipped[0] == skipped[1] > 3
    assert sum(len(keys) for keys in keys_of_steps(tmp_path / "two").values()) == 60 - skipped[0]
    alone_at_work = [
        line for line in read_lines(tmp_path / "two" / "keys-0.jsonl") if not line["keys"]
    ]
    assert alone_at_work


def test_bad_input_is_refused_once_before_the_first_step(arguments, tmp_path):
    result = call_together(2, *arguments("run", "data.images=nowhere"))
    assert result.returncode != 0
    told = [line for line in result.stderr.splitlines() if line.startswith("mlcd:")]
    assert len(told) == 1, result.stderr
    assert "nowhere" in told[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_process_that_dies_or_hangs_is_named(arguments, tmp_path, number):
    """Instead of a wait without end, in which the others would stay."""
    program = tmp_path / "program.py"
    program.write_text(
        "from datetime import timedelta\n"
        "import mlcd.training.processes as processes\n"
        "from mlcd.cli import main\n"
        "processes._TIMEOUT = timedelta(seconds=20)\n"
        "main()\n"
    )
    process = start_together(2, *arguments("run", "schedule.steps=5000"), program=[str(program)])
    wait_for_steps(tmp_path / "run", 15, process)
    hit = worker_of(process, 1)
    os.kill(hit, number)
    told = told_by(process)
    if number == signal.SIGSTOP:
        os.kill(hit, signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert "process 1 is gone (at step " in told
    assert "mlcd:" not in errors
    assert (tmp_path / "run.partial" / "checkpoints" / "step_000010").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_hangs_while_a_checkpoint_is_written_is_named(
    arguments, tmp_path, rank, number
):
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n"
        "from datetime import timedelta\n"
        "import mlcd.training.checkpoint.files as files\n"
        "import mlcd.training.processes as processes\n"
        "from mlcd.cli import main\n"
        "processes._TIMEOUT = timedelta(seconds=15)\n"
        "original = files._Writer.write_data\n"
        "def die(self, plan, planner):\n"
        f"    if 'step_000020' in str(self.path) and os.environ['RANK'] == '{rank}':\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "    return original(self, plan, planner)\n"
        "files._Writer.write_data = die\n"
        "main()\n"
    )
    process = start_together(2, *arguments("run"), program=[str(program)])
    told = told_by(process)
    if number == signal.SIGSTOP:
        os.kill(worker_of(process, rank), signal.SIGKILL)
    process.communicate(timeout=120)
    assert f"process {rank} is gone (at step 2" in told
    whole = [path.name for path in (tmp_path / "run.partial" / "checkpoints").glob("step_*[0-9]")]
    assert "step_000010" in whole
    assert "step_000020" not in whole


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(arguments, tmp_path, size):
    """A limit on the size of files stands for the disk: the first checkpoint fits, one with moments
    does not.
    """
    command = (
        torchrun(size, *arguments("run"))
        if size > 1
        else [sys.executable, "-m", "mlcd", *arguments("run")]
    )
    limited = ["bash", "-c", 'ulimit -f 150; exec "$@"', "bash", *map(str, command)]
    result = subprocess.run(limited, capture_output=True, text=True, timeout=240, check=False)
    told = [line for line in result.stderr.splitlines() if line.startswith("mlcd:")]
    assert result.returncode != 0
    assert len(told) == 1, result.stderr
    assert "the disk is full while writing" in told[0]
    assert "Traceback" not in result.stderr.split("torch/distributed")[0]
    assert [
        path.name for path in (tmp_path / "run.partial" / "checkpoints").glob("step_*[0-9]")
    ] == ["step_000000"]
    succeed(*arguments("run"))


@pytest.fixture
def stop_at(monkeypatch):
    """Runs a training, which is told to end when it begins a step."""

    def stop(step, command):
        with monkeypatch.context() as struck:
            before_step(struck, step, lambda _: signal.raise_signal(signal.SIGTERM))
            stopped = call_mlcd(*command)
        assert (stopped.returncode, "interrupted at step" in stopped.stdout) == (0, True), stopped

    return stop


def test_a_run_goes_on_with_other_accumulation_and_other_checkpoints(
    arguments, alone, stop_at, tmp_path
):
    options = ["compute.precision=fp64", "compute.accumulation=2", "schedule.steps=60"]
    whole, run = alone("resumed-whole", *options), tmp_path / "run"
    stop_at(8, arguments("run", *options))
    others = ["compute.accumulation=4", "checkpoint.every_steps=7", "optim.max_skips=3"]
    succeed("train", "--resume", run, *others)
    assert_alike(run, whole, tolerance=1e-9)
    config = json.loads((run / "manifest.json").read_text())["config"]
    assert (config["compute"]["accumulation"], config["checkpoint"]["every_steps"]) == (4, 7)
    assert "max_skips: 3" in (run / "config.yaml").read_text()
    ours, theirs = (last_weights(each, 60) for each in (run, whole))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in theirs)
    succeed("verify", run)
    refuse(
        "train",
        "--resume",
        run,
        "schedule.steps=99",
        contains="is finished and cannot be resumed with other settings: schedule.steps=99",
    )


def test_other_checkpoints_change_no_bit_of_a_run_that_goes_on(arguments, alone, stop_at, tmp_path):
    whole, run = alone("resumed-bits", "schedule.steps=60"), tmp_path / "run"
    stop_at(8, arguments("run", "schedule.steps=60"))
    succeed("train", "--resume", run, "checkpoint.every_steps=7")
    ours, theirs = (last_weights(each, 60) for each in (run, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_goes_on_to_another_number_of_steps_and_no_other_setting(
    arguments, stop_at, tmp_path
):
    run = tmp_path / "run"
    stop_at(12, arguments("run", "schedule.steps=5000"))
    for overrides, words in (
        (["optim.lr=0.1", "loss.scale=9"], ["optim.lr=0.1, before 0.001", "loss.scale=9.0"]),
        (["schedule.steps=10"], ["schedule.steps must be at least step", "got 10"]),
    ):
        refused = call_mlcd("train", "--resume", run, *overrides)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert all(word in refused.stderr for word in words), refused.stderr
    refuse(*arguments("run", "schedule.steps=70"), contains="schedule.steps=70, before 5000")
    reached = len(steps_of(tmp_path / "run.partial"))
    succeed("train", "--resume", run, f"schedule.steps={reached + 20}")
    assert [line["step"] for line in steps_of(run)] == list(range(1, reached + 21))
    lr = [line["lr"] for line in steps_of(run)]
    assert lr[-1] < 0.05 * lr[reached - 1]  # the cosine ends at the new total


def test_a_nan_at_step_7_is_caught_by_all_processes_and_replayed_by_one(arguments, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, mlcd.training.run.classification as loop\n"
        "from mlcd.cli import main\n"
        "original = loop.train_step\n"
        "def poisoned(state, *rest):\n"
        "    if state.step == 7 and state.head.world.rank == 1:\n"
        "        with torch.no_grad():\n"
        "            state.head.weight[0, 0] = torch.nan\n"
        "    return original(state, *rest)\n"
        "loop.train_step = poisoned\n"
        "main()\n"
    )
    process = start_together(2, *arguments("run", "compute.accumulation=2"), program=[str(program)])
    _, errors = process.communicate(timeout=240)
    (told,) = [line for line in errors.splitlines() if line.startswith("mlcd:")]
    assert "step 7: loss nan" in told
    kept = sorted(path.name for path in (tmp_path / "run.partial" / "bad_batches").iterdir())
    assert kept == ["step_000007-rank0", "step_000007-rank1", "step_000007-state"]
    shown = succeed(
        "train",
        "--resume",
        tmp_path / "run",
        "--replay",
        tmp_path / "run" / "bad_batches" / kept[0],
    )
    assert "step 7: loss nan" in shown.stdout
    assert "weights that are not finite: centers.weight\n" in shown.stdout
    assert "first output that is not finite: centers\n" in shown.stdout
    assert call_mlcd("train", "--resume", tmp_path / "run", "--replay", "nowhere").returncode == 2
    succeed("train", "--resume", tmp_path / "run")


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)]
)
def test_a_signal_before_the_first_step_ends_with_status_0(tmp_path, number):
    recipe = tmp_path / "recipe.yaml"
    os.mkfifo(recipe)
    process = start_mlcd("train", recipe, f"out={tmp_path / 'run'}")
    with recipe.open("w"):  # returns when the command is about to read its recipe
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "interrupted outside of the steps" in output
    assert "Traceback" not in output


def test_ctrl_c_while_torch_is_imported_leaves_no_traceback():
    program = """
import signal, sys
from mlcd.cli import main

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
main()
"""
    arguments = ["train", "smoke", "data.images=images", "data.labels=labels", "out=run"]
    result = run_python(program, *arguments, check=False)
    told = result.stderr.strip()
    assert (result.returncode, told) == (
        130,
        "mlcd: interrupted; run the same command again to resume",
    )
