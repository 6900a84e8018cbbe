import subprocess
import sys
import time

from tests.unit.service.engines import new_metrics, sample

COUNT = """
import sys
from pathlib import Path
from mlcd.service.telemetry.metrics import Metrics, use_multiprocess_dir

directory, slot = Path(sys.argv[1]), int(sys.argv[2])
use_multiprocess_dir(directory, slot)
metrics = Metrics(model="m", fingerprint="f", engine="e", precision="p", preprocess="1", multiprocess_dir=directory)
metrics.request("/v1/labels", 200, 0.02)
metrics.batch(3, 0.1, 0.01)
metrics.inference_request(200, 0.5, {"queue": (1.0, 1.01), "inference": (1.01, 1.11)})
metrics.inference_request(503, 0.25, {})
metrics.track_held("images", lambda: 5)
metrics.engine_up(lambda: slot == 0)
print(metrics.exposition().decode())
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


def test_requests_and_their_stages_are_timed_over_all_processes(tmp_path):
    counted(tmp_path, 0)
    found = counted(tmp_path, 1)
    assert 0 < time.time() - found["mlcd_last_inference_timestamp_seconds"] < 60
    for series, count, seconds in (
        ('mlcd_inference_request_seconds{}{{outcome="success"}}', 2, 1),
        ('mlcd_inference_request_seconds{}{{outcome="fail"}}', 2, 0.5),
        ('mlcd_inference_stage_seconds{}{{stage="queue"}}', 2, 0.02),
        ('mlcd_inference_stage_seconds{}{{stage="inference"}}', 2, 0.2),
    ):
        assert found[series.format("_count")] == count
        assert abs(found[series.format("_sum")] - seconds) < 1e-9
