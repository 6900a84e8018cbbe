"""The doctor examines any machine, and nothing that is missing makes it fail."""

import json
import os
import sys

import pytest

import mlcd.cores
from mlcd import doctor
from mlcd.clustering import device_labels
from mlcd.cores import available_cores, cpu_features, memory_limit_bytes, quota_cores
from mlcd.doctor import examine, report
from mlcd.encoders.openvino import computes_int8
from mlcd.export.starter.packages import is_installed
from mlcd.extras import install_command
from tests.conftest import call_mlcd, run_mlcd, run_python


def test_the_command_reports_and_exits_0():
    plain, as_json = run_mlcd("doctor"), call_mlcd("doctor", "--json")
    assert (plain.returncode, as_json.returncode) == (0, 0), plain.stderr
    facts = json.loads(as_json.stdout)
    assert facts["choice"]["engine"] in plain.stdout
    assert facts["cores"]["usable"] == available_cores()
    assert facts["packages"]["openvino"] in plain.stdout
    assert facts["starter"] == is_installed()
    assert facts["cpu"]["int8"] == computes_int8()
    assert ("int8           available" in plain.stdout) == computes_int8()


def test_nothing_missing_makes_it_fail(tmp_path, monkeypatch):
    for name in ("_CPUINFO", "_MEMINFO"):
        monkeypatch.setattr(doctor, name, tmp_path / "absent")
    monkeypatch.setattr(doctor, "cpu_features", lambda: cpu_features(tmp_path / "absent"))
    monkeypatch.setattr(doctor, "_NVIDIA_SMI", ("no-such-command",))
    monkeypatch.setattr(doctor, "_openvino_capabilities", lambda: None)
    monkeypatch.setattr(
        doctor, "memory_limit_bytes", lambda: memory_limit_bytes(tmp_path / "absent")
    )
    for package in ("torch", "faiss", "numba", "tritonclient"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(doctor, "_find_version", lambda package: None)
    monkeypatch.setattr(doctor, "starter_installed", lambda: False)
    facts = examine()
    assert f"starter        not installed: {install_command('starter')}" in report(facts)
    assert not any(state["used"] for state in facts["parts"].values())


def test_gpus_are_those_that_the_driver_lists(monkeypatch):
    monkeypatch.setattr(doctor, "_NVIDIA_SMI", ("echo", "Some GPU, 81559 MiB, 9.0, 570.1"))
    assert examine()["gpus"] == ["Some GPU, 81559 MiB, 9.0, 570.1"]


@pytest.mark.parametrize(
    ("engine", "has_gpu", "text"),
    [
        ("openvino", True, "labels         on the CPU in the service"),
        ("torch", False, "labels         on the CPU in the service"),
        ("torch", True, "labels         on the GPU, for centers of 4,194,304 components or more"),
    ],
)
def test_where_the_service_finds_labels_is_told(engine, has_gpu, text, monkeypatch):
    choice = {"engine": engine, "precision": "fp32", "reason": "of the test"}
    monkeypatch.setattr(doctor, "_describe_choice", lambda: choice)
    monkeypatch.setattr(device_labels, "has_device", lambda: has_gpu)
    assert text in report(examine())


def test_a_driver_that_hangs_or_fails_is_no_gpu(monkeypatch):
    for command in (("false",), ("sleep", "5")):
        monkeypatch.setattr(doctor, "_NVIDIA_SMI", command)
        monkeypatch.setattr(doctor, "_TIMEOUT_S", 0.05)
        assert examine()["gpus"] == []


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000\n", None), ("150000 100000\n", 1.5), ("broken", None)]
)
def test_the_quota_of_cgroup_v2(tmp_path, text, cores):
    (tmp_path / "cpu.max").write_text(text)
    assert quota_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", None), ("50000", 0.5)])
def test_the_quota_of_cgroup_v1(tmp_path, quota, cores):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert quota_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (1.5, 2), (0.3, 1), (64.0, 8)])
def test_usable_cores_are_within_cpuset_and_quota(monkeypatch, quota, expected):
    monkeypatch.setattr(mlcd.cores, "cpuset_cores", lambda: 8)
    monkeypatch.setattr(mlcd.cores, "quota_cores", lambda: quota)
    assert available_cores() == expected


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "max\n", None),
        ("memory.max", "1073741824\n", 2**30),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),
        ("memory/memory.limit_in_bytes", "1073741824\n", 2**30),
    ],
)
def test_the_memory_limit_of_either_cgroup(tmp_path, name, text, limit):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert memory_limit_bytes(tmp_path) == limit


def test_instruction_sets_that_matter_are_read(tmp_path):
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile amx_bf16\n"
    )
    assert cpu_features(tmp_path / "cpuinfo") == {"AVX2", "AVX512F", "AVX512_BF16", "AMX_BF16"}


def test_a_cpuset_is_obeyed():
    core = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, [{core}]); from mlcd.cores import available_cores as "
        "n; print(n())"
    )
    result = run_python(code)
    assert result.stdout.strip() == "1"


def test_it_compiles_the_loops_once_per_machine(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    assert run_mlcd("doctor", "--compile", env=environment).returncode == 0
    compiled = {path.name for path in tmp_path.rglob("*.nbc")}
    assert {name.partition(".")[0] for name in compiled} == {"compiled_loops"}
    assert run_mlcd("doctor", "--compile", env=environment).returncode == 0
    assert {path.name for path in tmp_path.rglob("*.nbc")} == compiled
