"""The study of `make gpu`, on a CPU with tiny photographs and steps."""

import io
import json
import re
import statistics
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.study import LOSSES, steps_that_fit, table

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("--photographs", "32", "--clusters", "10", "--each", "6", "--model", "pixels")


def call(*arguments):
    command = [sys.executable, "-m", "benchmarks.study", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Noise around a color for each class, as the shared data lie."""
    folder, generator = tmp_path_factory.mktemp("data"), np.random.default_rng(0)

    def photograph(number):
        pixels = generator.integers(0, 60, (64, 64, 3)) + 40 * (number % 4)
        buffer = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(buffer, "JPEG")
        return buffer.getvalue()

    shard = folder / "tiny_imagenet_pretrain" / "pretrain-0000.tar"
    shard.parent.mkdir()
    with tarfile.open(shard, "w") as tar:
        for number in range(40):
            content = photograph(number)
            member = tarfile.TarInfo(f"{number:03d}.jpg")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    for part, each in (("train", 6), ("val", 2)):
        for number in range(4 * each):
            path = folder / "tiny_imagenet_30" / part / f"class{number % 4}" / f"{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(photograph(number))
    return folder


@pytest.fixture
def packed(data, tmp_path):
    """A pack that was carried to another place, and the file of its rows."""
    files = ("--packed", tmp_path / "made", "--rows", tmp_path / "rows.jsonl")
    done = call("--pack", data, *SIZES, *files)
    assert done.returncode == 0, done.stderr
    (tmp_path / "made").rename(tmp_path / "carried")
    return ("--packed", tmp_path / "carried", "--rows", tmp_path / "rows.jsonl", "--device", "cpu")


def read(packed):
    return [json.loads(line) for line in packed[3].read_text().splitlines()]


def test_a_slice_adds_a_row_for_each_loss_and_seed_and_the_next_goes_on(packed, data):
    done = call(*packed, "--steps", "2")
    assert done.returncode == 0, done.stderr
    rows = read(packed)
    assert [(row["seed"], row["loss"]) for row in rows] == [
        (seed, loss) for seed in (1, 2, 3) for loss in LOSSES
    ]
    assert {row["steps"] for row in rows} == {2}
    assert all(0 <= row["knn"] <= 1 and row["commit"] and row["device"] for row in rows)
    assert "9 rows" in done.stdout
    assert call("--table", *packed).stdout == done.stdout[done.stdout.index("9 rows") :]
    assert call(*packed).stdout.startswith("left out: all seeds of the pack have rows")
    again = call("--pack", data, *SIZES, *packed[:4])
    assert "seeds 4, 5, 6" in again.stdout


def test_a_training_without_time_leaves_its_seed_out(packed):
    done = call(*packed, "--steps", "2", "--minutes", "0")
    assert done.returncode == 1
    assert "no seed ended in time" in done.stderr
    assert read(packed) == []


def test_a_training_that_exceeds_its_share_stops_after_a_step_and_leaves_its_seed_out(packed):
    program = (
        "import sys; from pathlib import Path; from benchmarks.study import Slice; "
        "part = Slice(Path(sys.argv[1]), Path(sys.argv[2]), 'cpu', 9000, 1e9); "
        "print(list(part._rows_of(1, 9000, 4.0)))"
    )
    command = [sys.executable, "-c", program, packed[1], packed[1].parent / "work"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    told, rows = done.stdout.splitlines()
    steps = int(re.fullmatch(r"seed 1: left out, cd made (\d+) of 9000 steps in 4 s", told)[1])
    assert (0 < steps < 9000, rows) == (True, "[]")


def test_without_a_pack_it_is_left_out(tmp_path):
    printed = call("--packed", tmp_path / "absent", "--rows", tmp_path / "rows").stdout
    assert printed.startswith("left out: ")


@pytest.mark.parametrize(
    ("seconds", "steps"), [(1000, 1500), (180, 1500), (179, 1400), (12, 100), (11, 0), (-5, 0)]
)
def test_the_steps_of_a_training_fit_its_time_with_a_margin_of_a_fifth(seconds, steps):
    assert steps_that_fit(seconds, 0.1, 1500) == steps


def test_the_table_has_mean_and_deviation_of_the_rows_of_one_length():
    values = {("cd", 1500): [0.2, 0.3, 0.25], ("mlcd", 1500): [0.4], ("cd", 900): [0.1]}
    rows = [
        {"device": "H200", "steps": steps, "loss": loss, "seed": seed, "knn": value}
        for (loss, steps), group in values.items()
        for seed, value in enumerate(group)
    ]
    rows.append(rows[0])  # as when a file is appended twice
    first, *_, short, cd, mlcd = table(rows).splitlines()
    assert first == "5 rows"
    assert short == "| H200 | 900 | cd | 1 | 10.0 |"
    assert cd == f"| H200 | 1500 | cd | 3 | 25.0 ± {statistics.stdev([20, 30, 25]):.1f} |"
    assert mlcd == "| H200 | 1500 | mlcd | 1 | 40.0 |"
