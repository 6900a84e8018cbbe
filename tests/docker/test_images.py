"""The images: what is in them, who they run as, and that they need nothing of what a container may
be denied.
"""

import json
import time

import pytest

from tests.conftest import write_digits
from tests.docker.engine import docker, image_size

DENIED = (
    "run",
    "--rm",
    "--read-only",
    "--cap-drop",
    "ALL",
    "--security-opt",
    "no-new-privileges",
    "--tmpfs",
    "/tmp",
)
MAX_API_BYTES = 1_250_000_000  # 124 MB of them the starter
PACKAGES = (
    *("torch", "triton", "onnx", "sklearn", "openvino", "openvino_telemetry", "redis"),
    *("tritonclient", "pip"),
)


def inspect(name):
    return json.loads(docker("inspect", name).stdout)[0]


def packages_in(name):
    script = (
        f"import importlib.util as u; print([name for name in {PACKAGES} if u.find_spec(name)])"
    )
    return set(
        json.loads(
            docker(*DENIED, "--entrypoint", "python", name, "-c", script).stdout.replace("'", '"')
        )
    )


def give_back(work, name):
    """The files are the containers' user's: whoever runs the tests must be able to remove them."""
    mine = ("run", "--rm", "--user", "0", "--volume", f"{work}:/work", "--entrypoint", "chmod")
    docker(*mine, name, "-R", "a+rwX", "/work")


@pytest.mark.parametrize("target", ["api", "worker"])
def test_what_serves_is_small_and_holds_no_torch_no_installer_and_nothing_that_reports(
    image, target
):
    name = image(target)
    assert packages_in(name) == {"openvino", "redis", "tritonclient"}
    assert image_size(name) <= MAX_API_BYTES


def test_what_serves_on_a_gpu_holds_no_trainer_and_says_why_no_gpu_is_used_here(image):
    name = image("api-gpu")
    assert packages_in(name) == {"torch", "triton", "openvino", "redis", "tritonclient"}
    parts = json.loads(docker(*DENIED, "--network", "none", name, "doctor", "--json").stdout)[
        "parts"
    ]
    assert parts["CUDA of torch"]["used"]
    assert "no NVIDIA driver" in parts["GPU"]["detail"]
    assert "--gpus all" in parts["GPU"]["remedy"]
    assert parts["search on GPUs"] == {
        "used": False,
        "detail": "FAISS 1.15.1 finds no GPU",
        "remedy": "see GPU",
    }


@pytest.mark.parametrize("target", ["api-gpu", "train"])
def test_a_part_of_the_kernels_is_compiled_and_loaded_where_a_container_may_execute(image, target):
    """Without a driver the loader misses its functions, and nothing else."""
    script = """
import triton.backends.nvidia.driver as driver
from pathlib import Path
from triton.runtime.build import compile_module_from_src as build
build(Path(driver.__file__).with_name("driver.c").read_text(), "cuda_utils", include_dirs=driver.include_dirs)
"""
    kept = ("--volume", "/var/lib/mlcd", "--entrypoint", "python")
    error = docker(*DENIED, *kept, image(target), "-c", script, check=False).stderr
    assert error.splitlines()[-1].endswith("undefined symbol: cuModuleGetFunction"), error


@pytest.mark.parametrize("target", ["api", "worker", "api-gpu", "train", "triton-cpu"])
def test_no_image_runs_as_root(image, target):
    config = inspect(image(target))["Config"]
    assert config["User"] == "10001:10001"
    assert docker(*DENIED, "--entrypoint", "id", image(target), "-u").stdout.strip() == "10001"


def test_nobody_is_served_by_default(image):
    result = docker(*DENIED, "--env", "MLCD_MODEL=pixels", image("api"), check=False)
    assert result.returncode == 2
    assert "use the server without API keys" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_worker_has_the_commands_and_no_server(image):
    assert "embed" in docker(*DENIED, image("worker")).stdout
    config = inspect(image("worker"))["Config"]
    assert "Healthcheck" not in config


@pytest.mark.parametrize("target", ["api", "api-gpu"])
def test_it_serves_the_starter_without_a_network_and_tells_when_it_is_ready(image, target):
    started = ("run", "--detach", *DENIED[1:], "--network", "none", "--env", "MLCD_AUTH__MODE=open")
    container = docker(*started, image(target)).stdout.strip()
    try:
        deadline = time.monotonic() + 120
        while (state := inspect(container)["State"])["Health"]["Status"] != "healthy":
            assert state["Running"], docker("logs", container).stderr
            assert time.monotonic() < deadline, state
            time.sleep(0.5)
        assert "serving starter (openvino" in docker("logs", container).stdout
    finally:
        docker("rm", "--force", container)


def test_the_worker_image_runs_the_commands_over_artifacts(image, tmp_path):
    work = tmp_path / "work"
    write_digits(work / "digits", 8)
    work.chmod(0o777)
    mounted = (*DENIED, "--volume", f"{work}:/work", "--workdir", "/work", "--network", "none")
    for command in (
        "embed digits emb --model pixels",
        "cluster emb centers --clusters 2",
        "clusters update centers emb updated",
        "label emb labels --centers centers",
        "index emb items",
        "verify .",
    ):
        printed = docker(*mounted, image("worker"), *command.split())
    assert [line.split()[:2] for line in printed.stdout.splitlines()].count(["ok", "labels"]) == 1
    give_back(work, image("worker"))


def test_the_train_image_makes_a_model_that_serves(image, tmp_path, tiny_recipe):
    work = tmp_path / "work"
    write_digits(work / "digits", 120)
    (work / "tiny.yaml").write_text(tiny_recipe.read_text())
    work.chmod(0o777)
    mounted = (*DENIED, "--volume", f"{work}:/work", "--network", "none")
    command = (
        "demo",
        "--images",
        "/work/digits",
        "--recipe",
        "/work/tiny.yaml",
        "--out",
        "/work/demo",
        "--no-serve",
    )
    docker(*mounted, image("train"), *command, timeout=900)
    verified = docker(*mounted, image("worker"), "verify", "/work/demo").stdout.splitlines()
    assert any(line.split()[:3] == ["ok", "model", "/work/demo/model:"] for line in verified)
    give_back(work, image("worker"))
