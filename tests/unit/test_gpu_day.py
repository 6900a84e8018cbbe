"""`make gpu`, as far as a machine without a GPU can test it."""

import ast
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu import (
    MAX_WHEEL_BYTES,
    SLICES,
    Slice,
    check_wheels,
    gpu_tests,
    run,
    table,
    write,
)

ROOT = Path(__file__).resolve().parents[2]


def printed(*arguments):
    """Returns what a slice's command prints on a CPU, at tiny sizes."""
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def on_cpu(name):
    """The arguments of a slice, on a CPU."""
    (piece,) = (each for each in SLICES if each.name == name)
    return ["cpu" if argument == "cuda" else argument for argument in piece.arguments]


def test_the_files_of_its_tests_are_all_that_hold_one_and_no_others():
    """The marks are read from the syntax, wherever they stand in a file."""
    holding = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        marks = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark"
        }
        if "gpu" in marks:
            holding.append(path.relative_to(ROOT).as_posix())
    assert list(gpu_tests()) == holding
    (piece,) = (each for each in SLICES if each.name == "tests")
    assert piece.arguments == ("-m", "pytest", "-q", "-n0", "-m", "gpu", *holding)


def test_every_slice_has_a_name_and_ends_within_four_minutes_but_the_study():
    assert len({piece.name for piece in SLICES}) == len(SLICES)
    assert [piece.name for piece in SLICES if piece.limit_s > 240] == ["study"]
    assert all(piece.limit_s < 540 for piece in SLICES)
    slow = Slice("slow", ("-c", "print('begun', flush=True); import time; time.sleep(60)"), 2)
    result = run(slow)
    assert (result["status"], result["seconds"] < 30) == ("time limit", True)


def test_at_its_limit_a_slice_ends_with_what_it_started(tmp_path):
    """A benchmark has processes of its own, which would share the GPU with the next slice."""
    child = f"import time; time.sleep(4); open({str(tmp_path / 'alive')!r}, 'w')"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    result = run(Slice("parent", ("-c", f"print('begun', flush=True); {program}"), 2))
    assert (result["status"], result["output"]) == ("time limit", ["begun"])
    time.sleep(4)
    assert not (tmp_path / "alive").exists()


def test_what_is_left_out_is_not_said_to_have_passed():
    nothing, part = "print('left out: no GPU')", "print('left out, as cuVS lacks: graph\\nscan 1')"
    results = [run(Slice("none", ("-c", program))) for program in (nothing, part)]
    assert [result["status"] for result in results] == ["left out", "in part"]
    assert "| in part |" in table(results)


def test_the_rows_of_the_study_are_written_beside_the_results(tmp_path):
    (piece,) = (each for each in SLICES if each.name == "study")
    assert piece.command(tmp_path)[-2:] == ["--rows", str(tmp_path / "study.jsonl")]


def test_a_result_states_where_it_is_from_and_stands_in_the_table(tmp_path):
    passed = run(Slice("good", ("-c", "print('12 images/s | x'); print('{\"rate\": 12}')")))
    failed = run(Slice("bad", ("-c", "raise SystemExit(3)")))
    stored = json.loads(write(passed, tmp_path).read_text())
    assert stored["output"] == ["12 images/s | x"]
    assert stored["figures"] == {"rate": 12}
    assert {"device", "torch", "cuda", "commit", "command", "seconds"} <= stored.keys()
    lines = table([passed, failed]).splitlines()
    assert "| good |" in lines[2]
    assert "12 images/s / x" in lines[2]
    assert "failed (3)" in lines[3]


def test_wheels_that_are_too_large_to_carry_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="there are none"):
        check_wheels(tmp_path)
    (tmp_path / "one.whl").write_bytes(bytes(1000))
    assert "one.whl" in check_wheels(tmp_path)
    with (tmp_path / "two.whl").open("wb") as file:
        file.truncate(MAX_WHEEL_BYTES)
    with pytest.raises(SystemExit, match="too large"):
        check_wheels(tmp_path)


def test_training_is_measured_with_its_head_its_loader_and_its_losses():
    sizes = ("--tower", "small", "--batch", "8", "--classes", "500", "--images", "32", "--side")
    steps = ("--steps", "1", "--runs", "1", "--workers", "1")
    curves = ("--curve-steps", "3", "--curve-batch", "8")
    result = run(Slice("train", (*on_cpu("train-b32"), *sizes, "40", *steps, *curves)))
    assert result["status"] in ("0", "in part"), result["output"]  # without nvImageCodec
    figures, text = result["figures"], "\n".join(result["output"])
    for form in ("synthetic", "loader", "plain"):
        rate, share = re.search(
            rf"^  {form} +([\d.e+-]+) .* ([\d.]+) \([\d.]+ to [\d.]+\) % of the limit$",
            text,
            re.MULTILINE,
        ).groups()
        assert float(rate) == pytest.approx(figures[form]["images_per_s"], rel=1e-3)
        assert float(share) == pytest.approx(100 * figures[form]["mfu"], abs=0.06)
        assert 0 <= figures[form]["data_wait"] < 1
    flops = 1e9 * (figures["tower_gflops"] + figures["head_gflops"])
    rate = figures["synthetic"]["mfu"] * figures["matrix_limit_tflops"] * 1e12 / flops
    assert rate == pytest.approx(figures["synthetic"]["images_per_s"], rel=1e-6)
    assert 0 < figures["head_share"] < 1
    assert figures["peak_memory_gib"] > 0.1
    losses = figures["losses"]
    assert len(losses["bf16"]) == len(losses["fp32"]) == 3
    assert losses["bf16"] != losses["fp32"]
    ratios = np.array(losses["bf16"]) / losses["fp32"]
    difference = abs(ratios - 1).max()
    assert figures["largest_relative_difference"] == pytest.approx(difference)
    assert difference < 0.05


@pytest.mark.parametrize("name", ["encode-b32", pytest.param("encode-l14", marks=pytest.mark.slow)])
def test_encoders_are_measured_beside_the_matrix_limit(name):
    found = printed(*on_cpu(name), "--tower", "tiny", "--batches", "1", "40", "--runs", "1")
    limit = float(re.search(r"TFLOP/s: fp32 ([\d.e-]+)", found)[1])
    rows = re.findall(r"batch +(\d+) torch-fp32 .* ([\d.e-]+) TFLOP/s, ([\d.]+)%", found)
    assert [int(num) for num, *_ in rows] == [1, 40]
    for _, rate, share in rows:
        assert float(share) == pytest.approx(100 * float(rate) / limit, rel=0.02, abs=0.06)


def test_labels_of_the_service_are_measured_beside_its_embeddings():
    sizes = ("--tower", "tiny", "--centers", "3000", "--dimension", "32", "--images", "96")
    found = printed(*on_cpu("labels-service"), *sizes, "--batches", "1", "40", "--runs", "1")
    assert "3000 centers of 32, top 8: labels by the engine" in found
    rows = re.findall(
        r"batch +(\d+) embeddings ([\d.]+) .*, labels ([\d.]+) .* add (-?[\d.]+) .* found ([\d.]+)%",
        found,
    )
    assert [(int(num), share) for num, *_, share in rows] == [(1, "100.00"), (40, "100.00")]
    for _, embedding, labels, added, _ in rows:
        ratio = float(labels) / float(embedding) - 1
        assert float(added) == pytest.approx(ratio, abs=0.01 + 0.01 * ratio)
    assert found.count("images have the bytes of the server's scan: True") == 2


def test_the_scan_is_measured_beside_the_matrix_limit():
    sizes = ("--centers", "3000", "--rows", "64", "--dimension", "32", "--runs", "1")
    found = printed(*on_cpu("top8-1m"), *sizes, "--data", "random")
    rate, share, limit = map(
        float,
        re.search(
            r"numpy +([\d.e-]+) TFLOP/s, ([\d.]+)% .* limit of ([\d.e-]+) TFLOP/s in fp32", found
        ).groups(),
    )
    assert share == pytest.approx(100 * rate / limit, rel=0.02, abs=0.06)
    assert "numpy        identical label sets on 100.00 % of 64 audited rows" in found


def test_kmeans_tells_rows_in_a_second():
    sizes = ("--clusters", "8", "--dimension", "16", "--iterations", "2", "--runs", "1")
    found = printed(*on_cpu("kmeans"), *sizes, "--rows", "2000")
    seconds, rate = re.search(r"mlcd +([\d.]+) s .*  ([\d,]+) rows/s", found).groups()
    work = float(rate.replace(",", "")) * float(seconds)
    assert work == pytest.approx(2 * 2000, abs=float(rate.replace(",", "")) * 0.006)


def test_the_head_is_measured_in_every_form_that_a_device_has():
    sizes = ("--batch", "32", "--dimension", "16", "--runs", "1")
    found = printed(*on_cpu("head"), *sizes, "--classes", "500")
    forms = re.findall(r"^  (\S+) +[\d.]+ s \(.* activations +\S+ MiB", found, re.MULTILINE)
    assert forms == ["ours", "materialized", "per_column", "dense"]


def test_a_search_on_a_device_is_compared_with_the_cpus():
    found = printed(*on_cpu("faiss-search"), "--items", "3000", "--dimension", "32")
    recall = dict(re.findall(r"^(\w+ \w+): recall@10 ([\d.]+)$", found, re.MULTILINE))
    assert recall.keys() == {"cpu scan", "gpu scan", "cpu index"}
    assert recall["gpu scan"] == recall["cpu scan"] == "1.0000"
    assert 0.9 < float(recall["cpu index"]) <= 1
    for arm in ("gpu cagra", "gpu index"):
        assert f"left out, as it needs a GPU and faiss-gpu-cuvs: {arm}" in found
    assert (
        len(re.findall(r"gpu scan: .* times the cpu scan's .* times the cpu index's", found)) == 3
    )


def test_a_search_on_a_gpu_is_left_out_without_one():
    found = printed("benchmarks/search.py", "--device", "cuda", "--items", "10")
    assert found.strip() == "left out: neither torch nor faiss-gpu-cuvs finds a GPU here"


def test_the_gpus_search_is_measured_where_faiss_is_not_installed():
    program = "import sys; sys.modules['faiss'] = None; import runpy; "
    program += "sys.argv = ['search.py', '--device', 'cpu', '--items', '500', '--dimension', '8']; "
    program += "runpy.run_path('benchmarks/search.py', run_name='__main__')"
    found = printed("-c", program)
    assert "left out, as faiss is not installed: cpu index, gpu index" in found
    assert re.search(r"^64 at once, gpu scan: [\d,]+ queries/s", found, re.MULTILINE)
