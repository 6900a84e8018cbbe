import json
import subprocess
import sys
import time

from service.telemetry.statistics import inference_statistics
from tests.unit.service.engines import new_metrics, sample

COUNT = """
import sys
from pathlib import Path
from service.telemetry.metrics import Metrics, use_multiprocess_dir

directory, slot = Path(sys.argv[1]), int(sys.argv[2])
use_multiprocess_dir(directory, slot)
metrics = Metrics(model="m", fingerprint="f", engine="e", precision="p", preprocess="1", multiprocess_dir=directory)
metrics.request("/v1/labels", 200, 0.02)
metrics.batch(3, 0.1, 0.01)
metrics.inference_request(200, 0.5, {"queue": (1.0, 1.01), "inference": (1.01, 1.11)})
metrics.inference_request(503, 0.25, {})
metrics.held("images", lambda: 5)
metrics.engine_up(lambda: slot == 0)
print(metrics.exposition().decode())
"""
STATISTICS = """
import json
from service.telemetry.statistics import inference_statistics

print(json.dumps(inference_statistics(metrics.counted())))
"""


def counted(directory, slot):
    done = subprocess.run(
        [sys.executable, "-c", COUNT, directory, str(slot)],
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in done.stdout.splitlines()
        if line[:1] != "#" and line
    }


def test_what_is_asked_is_asked_when_it_is_read():
    metrics, depth = new_metrics(), 3
    metrics.queue_depth("decode", lambda: depth)
    assert sample(metrics, 'mlcd_queue_depth{stage="decode"}') == 3
    depth = 4
    assert sample(metrics, 'mlcd_queue_depth{stage="decode"}') == 4


def test_processes_are_counted_together_and_one_that_comes_back_goes_on(tmp_path):
    request, batch = 'mlcd_requests_total{route="/v1/labels",status="200"}', "mlcd_batch_size_sum"
    first = counted(tmp_path, 0)
    second = counted(tmp_path, 1)
    assert (first[request], second[request], second[batch]) == (1, 2, 6)
    assert second['mlcd_held{of="images"}'] == 10
    assert (second["mlcd_engine_up"], second["mlcd_processes"]) == (1, 2)
    again = counted(tmp_path, 0)
    assert (again[request], again[batch], again["mlcd_processes"]) == (3, 9, 2)
    buckets = [
        number for name, number in again.items() if name.startswith("mlcd_batch_size_bucket")
    ]
    assert max(buckets) == again["mlcd_batch_size_count"] == 3
    assert len(list(tmp_path.iterdir())) == len({path.name for path in tmp_path.iterdir()}) <= 12


def test_no_series_has_a_process_in_its_name(tmp_path):
    assert not [name for name in counted(tmp_path, 7) if "pid=" in name]


def test_tritons_statistics_are_what_all_processes_have_counted(tmp_path):
    def counted(slot):
        command = [sys.executable, "-c", COUNT + STATISTICS, tmp_path, str(slot)]
        return json.loads(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[
                -1
            ]
        )

    counted(0)
    found = counted(1)
    assert 0 < time.time() - found.pop("last_inference") / 1000 < 60
    none = {"count": 0, "ns": 0}
    assert found == {
        "inference_count": 6,
        "execution_count": 2,
        "inference_stats": {
            "success": {"count": 2, "ns": 1_000_000_000},
            "fail": {"count": 2, "ns": 500_000_000},
            "queue": {"count": 2, "ns": 20_000_000},
            "compute_input": none,
            "compute_infer": {"count": 2, "ns": 200_000_000},
            "compute_output": none,
            "cache_hit": none,
            "cache_miss": none,
        },
        "batch_stats": [],
    }


def test_an_engine_that_makes_its_own_batches_is_counted_by_image():
    metrics = new_metrics()
    assert inference_statistics(metrics.counted())["last_inference"] == 0
    for _ in range(3):
        metrics.inferred(0.1)
    found = inference_statistics(metrics.counted())
    assert (found["inference_count"], found["execution_count"]) == (3, 3)
