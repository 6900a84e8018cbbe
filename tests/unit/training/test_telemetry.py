"""Rates are those of what was done; logs hold what was measured, and forget what a resumed run does
again.
"""

import json
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

import mlcd.training.telemetry.throughput as measuring
from mlcd.errors import ConfigInvalid
from mlcd.training.telemetry.loss_picture import write_losses
from mlcd.training.telemetry.step_logs import TENSORBOARD, MetricsLog, TensorBoardLog
from mlcd.training.telemetry.throughput import Throughput, measure_peak_tflops, peak_memory_bytes
from tests.conftest import run_python

CPU = torch.device("cpu")


def test_a_window_tells_images_arithmetic_and_waiting():
    throughput = Throughput(flops_per_image=2e9, peak_tflops=0.5, device=CPU)
    began = time.perf_counter()
    for _ in range(4):
        throughput.add(50, wait_s=0.03)
        time.sleep(0.1)
    rates = throughput.read()
    seconds = time.perf_counter() - began
    assert rates["images_per_s"] == pytest.approx(200 / seconds, rel=0.05)
    assert rates["tflops"] == pytest.approx(rates["images_per_s"] * 2e9 / 1e12)
    assert rates["mfu"] == pytest.approx(rates["tflops"] / 0.5)
    assert rates["data_wait"] == pytest.approx(0.12 / seconds, rel=0.05)
    assert 0 < rates["data_wait"] < 1


def test_reading_begins_a_new_window():
    throughput = Throughput(1e9, 1.0, CPU)
    throughput.add(1000, wait_s=10.0)
    throughput.read()
    time.sleep(0.01)
    rates = throughput.read()
    assert (rates["images_per_s"], rates["data_wait"], rates["mfu"]) == (0, 0, 0)


def test_peak_memory_counts_what_was_freed():
    code = (
        "import torch; from mlcd.training.telemetry.throughput import peak_memory_bytes as peak\n"
        "before = peak(torch.device('cpu')); large = torch.ones(50_000_000); del large\n"
        "print(peak(torch.device('cpu')) - before)"
    )
    result = run_python(code)
    assert 0.9 * 200e6 < int(result.stdout) < 1.2 * 200e6
    assert Throughput(1.0, 1.0, CPU).read()["peak_memory_gib"] == pytest.approx(
        peak_memory_bytes(CPU) / 2**30, rel=0.01
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_a_peak_is_measured_in_every_precision(precision):
    assert 1e-4 < measure_peak_tflops(CPU, precision) < 1e3


def test_a_precision_that_is_emulated_costs_few_seconds(monkeypatch):
    tried = []

    def emulated(size, device, dtype):
        tried.append(size)
        return size**3 * 1e-9

    monkeypatch.setattr(measuring, "_product_seconds", emulated)
    assert measure_peak_tflops(CPU, "bf16") == pytest.approx(2e-3)
    assert max(tried) == 512


def test_a_stall_at_the_start_is_not_taken_for_the_machine_s_rate(monkeypatch):
    tried, rates = [], []

    def stalled_at_first(size, device, dtype):
        seconds = product_seconds(size, device, dtype)
        tried.append(size)
        if len(tried) <= 2:  # longer than the measurement is to take
            time.sleep(0.4)
            seconds += 0.4
        rates.append(2.0 * size**3 / seconds / 1e12)
        return seconds

    product_seconds = measuring._product_seconds
    monkeypatch.setattr(measuring, "_product_seconds", stalled_at_first)
    assert measure_peak_tflops(CPU, "fp32") == max(rates[1:])
    assert max(tried) >= 1024
    assert len(tried) - 2 >= 5


def test_the_measured_peak_leaves_random_numbers_alone():
    before = torch.random.get_rng_state()
    measure_peak_tflops(CPU, "fp32")
    assert torch.equal(before, torch.random.get_rng_state())


def test_metrics_of_a_lost_future_are_dropped_and_half_a_line_too(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for step in (10, 20, 30):
        log.append({"step": step, "loss": 1.0 / step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "lo')
    MetricsLog(tmp_path, 20).append({"step": 30, "loss": 7.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(10, 0.1), (20, 0.05), (30, 7.0)]


def test_the_losses_are_drawn_from_the_first_step_to_the_last(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for step, loss in ((10, 4.0), (20, None), (30, 1.0)):
        log.append({"step": step, "loss": loss})
    write_losses(tmp_path)
    with Image.open(tmp_path / "loss.png") as picture:
        blue = np.argwhere((np.asarray(picture) == (0x3B, 0x7E, 0xA1)).all(axis=2))
    top, left = blue.min(axis=0)
    bottom, right = blue.max(axis=0)
    assert (right - left, bottom - top) == pytest.approx((640, 320), abs=3)
    assert (
        blue[blue[:, 1] == left][:, 0].mean() < blue[blue[:, 1] == right][:, 0].mean()
    )  # it falls


def test_one_loss_is_not_drawn(tmp_path):
    MetricsLog(tmp_path, 0).append({"step": 10, "loss": 1.0})
    write_losses(tmp_path)
    assert not (tmp_path / "loss.png").exists()


@pytest.fixture
def read_scalars(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read():
        events = EventAccumulator(str(tmp_path / TENSORBOARD))
        events.Reload()
        return {
            name: [(event.step, event.value) for event in events.Scalars(name)]
            for name in events.Tags()["scalars"]
        }

    return read


def test_cutting_back_never_leaves_half_a_file(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for step in (1, 2, 3):
        log.append({"step": step})
    with (tmp_path / "metrics.jsonl").open() as before:
        MetricsLog(tmp_path, 2)
        assert len(before.read().splitlines()) == 3  # another file took its place, whole
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_shows_every_number_but_what_is_null(tmp_path, read_scalars):
    log = TensorBoardLog(tmp_path, 0)
    log.append({"step": 10, "loss": 0.5, "positive_cosine": None, "images_per_s": 100})
    log.append({"step": 20, "loss": 0.25, "positive_cosine": 0.75, "images_per_s": 200})
    log.close()
    assert read_scalars() == {
        "loss": [(10, 0.5), (20, 0.25)],
        "positive_cosine": [(20, 0.75)],
        "images_per_s": [(10, 100.0), (20, 200.0)],
    }


def test_tensorboard_leaves_out_the_steps_that_are_done_again(tmp_path, read_scalars):
    first = TensorBoardLog(tmp_path, 0)
    for step in (10, 20, 30):
        first.append({"step": step, "loss": float(step)})
    first.close()
    time.sleep(1.1)  # event files are named by the second
    second = TensorBoardLog(tmp_path, 20)
    second.append({"step": 30, "loss": 3.0})
    second.close()
    assert read_scalars() == {"loss": [(10, 10.0), (20, 20.0), (30, 3.0)]}


def test_tensorboard_that_is_not_installed_is_one_clear_line(tmp_path, monkeypatch):
    for name in [
        name
        for name in sys.modules
        if name.split(".")[0] == "tensorboard" or "torch.utils.tensorboard" in name
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigInvalid, match=r"requires the package tensorboard.*\[tensorboard\]"):
        TensorBoardLog(tmp_path, 0)
