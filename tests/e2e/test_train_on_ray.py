"""`mlcd train --on ray` on real clusters of this machine: the run of torchrun, whatever is killed."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from mlcd.artifacts.manifest import open_artifact
from tests.conftest import run_mlcd, start_mlcd, succeed
from tests.e2e.test_ray import (  # noqa: F401 - its fixtures
    cluster_of,
    quiet_ray,
    started_by_hand,
    token,
    wait_for,
)
from tests.e2e.test_train import (  # noqa: F401 - its fixtures
    arguments,
    assert_alike,
    labels,
    start_together,
    wait_for_steps,
)

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

TWO = ("--on", "ray", "--workers", 2)
# enough steps for what is killed in the middle; on two workers each takes some 20 ms
LONG = ("schedule.steps=300", "checkpoint.every_steps=20")


@pytest.fixture
def cluster():
    with cluster_of(2) as made:
        yield made


@pytest.fixture(scope="module")
def long_alone(labels, digits, tiny_recipe, tmp_path_factory):  # noqa: F811
    """The long run by one process, without Ray."""
    out = tmp_path_factory.mktemp("long") / "alone"
    places = [f"data.images={digits}", f"data.labels={labels}", f"out={out}"]
    logged = ("log_every=1", "telemetry.keys=true", "telemetry.peak_tflops=1")
    succeed("train", tiny_recipe, *places, *logged, *LONG)
    return out


def workers_on_ray():
    """The processes that train on this machine's clusters."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            is_worker = command.read_bytes().startswith(b"ray::RayTrainWorker")
        except OSError:  # it ended meanwhile
            continue
        if is_worker:
            found.append(int(command.parent.name))
    return found


def start_driver(*command):
    return start_mlcd(*command, stderr=subprocess.PIPE)


def ended(driver):
    """Returns what a driver said, less that a busy machine keeps its workers waiting."""
    said, errors = driver.communicate(timeout=400)
    assert driver.returncode == 0, errors
    lines = [line for line in errors.splitlines() if "has started yet" not in line]
    return said, lines


def test_two_workers_make_the_run_of_torchrun(cluster, arguments, tmp_path):  # noqa: F811
    together = start_together(2, *arguments("torchrun"))
    ended(together)
    said, errors = ended(start_driver(*arguments("ray"), *TWO))
    assert (said.split(" to loss ")[0], errors) == ("trained 160 images", [])
    one, other = (open_artifact(tmp_path / name) for name in ("ray", "torchrun"))
    assert one.digest == other.digest
    assert_alike(one.path, other.path, tolerance=0)
    assert len(list(one.path.glob("keys-*.jsonl"))) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ray", "torchrun"]
    succeed("verify", one.path)
    again, errors = ended(start_driver("train", "--resume", one.path, *TWO))
    assert (again, errors) == (said, [])


def test_a_killed_worker_costs_no_more_than_the_steps_since_the_last_checkpoint(
    cluster,
    arguments,  # noqa: F811
    long_alone,
    tmp_path,
):
    driver = start_driver(*arguments("run", *LONG), *TWO)
    wait_for_steps(tmp_path / "run", 50, driver)
    workers = workers_on_ray()
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    _, errors = ended(driver)
    assert errors == ["mlcd: a worker was lost; 2 continue from the last checkpoint"]
    assert_alike(tmp_path / "run", long_alone, tolerance=1e-5)


def test_a_lost_node_leaves_the_rest_to_the_other(cluster, arguments, long_alone, tmp_path):  # noqa: F811
    driver = start_driver(*arguments("run", *LONG), *TWO)
    wait_for_steps(tmp_path / "run", 50, driver)
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    _, errors = ended(driver)
    assert errors == ["mlcd: a worker was lost; 1 continue from the last checkpoint"]
    assert_alike(tmp_path / "run", long_alone, tolerance=1e-5)


def test_a_killed_driver_is_run_again_and_goes_on(cluster, arguments, long_alone, tmp_path):  # noqa: F811
    command = (*arguments("run", *LONG), *TWO)
    driver = start_driver(*command)
    wait_for_steps(tmp_path / "run", 50, driver)
    driver.kill()
    driver.communicate()
    assert not (tmp_path / "run").exists()
    ended(start_driver(*command))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert_alike(tmp_path / "run", long_alone, tolerance=1e-5)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_to_the_driver_saves_first(
    number,
    status,
    cluster,
    arguments,  # noqa: F811
    long_alone,
    tmp_path,
):
    """The same run ends by one process, without Ray."""
    driver = start_driver(*arguments("run", "schedule.steps=300"), *TWO)
    wait_for_steps(tmp_path / "run", 50, driver)
    driver.send_signal(number)
    said, errors = driver.communicate(timeout=120)
    assert driver.returncode == status, errors
    steps = sorted((tmp_path / "run.partial" / "checkpoints").glob("step_*[0-9]"))
    assert int(steps[-1].name.removeprefix("step_")) > 50
    if status == 0:
        reached = int(steps[-1].name.removeprefix("step_"))
        assert said.startswith(f"interrupted at step {reached}, which is saved")
    succeed("train", "--resume", tmp_path / "run")


def test_errors_are_one_line_and_a_second_driver_is_refused(cluster, arguments, tmp_path):  # noqa: F811
    for name in ("images", "labels"):
        missing = run_mlcd(*arguments("run", f"data.{name}=nowhere"), *TWO)
        assert missing.returncode == 2
        assert missing.stderr.splitlines()[-1].startswith("mlcd: ")
        assert "nowhere" in missing.stderr.splitlines()[-1]
        assert "Traceback" not in missing.stderr
    command = (*arguments("run", "schedule.steps=30000"), "--on", "ray", "--workers", 1)
    driver = start_driver(*command)
    wait_for_steps(tmp_path / "run", 5, driver)
    second = run_mlcd(*command, timeout=400)
    driver.send_signal(signal.SIGTERM)
    ended(driver)
    assert second.returncode == 2, second.stderr
    assert second.stderr.splitlines()[-1] == (
        f"mlcd: another process is writing {tmp_path / 'run'}.partial: "
        "wait for it or give another output"
    )
