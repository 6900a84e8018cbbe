"""The 611 odd, broken and hostile files of the shared data: every outcome agrees with Pillow's or
has a rule.
"""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlcd.images.decode import DEFAULT_LIMITS, FORMATS
from mlcd.images.heic import has_heic

# Address space, and a ceiling of the kernel, not a measurement after the fact: a bomb fails the
# child, not the machine. It is what the files' provenance gave to Pillow. OpenBLAS keeps to one
# thread, else each core would reserve its own.
MEMORY_BYTES = 3 * 2**30
PEAK_BYTES = 512 * 2**20  # resident, interpreter and libraries included; about 125 MB are used
SECONDS_PER_FILE = 20.0  # the slowest takes 0.2 s

# Why we refuse what Pillow opened: (rule, whom it covers, our reason).
RULES = [
    (
        "format not allowed",
        lambda row: row["format"] not in {*FORMATS, "MPO"},
        "unsupported-format",
    ),
    (
        "pixel cap",
        lambda row: int(row["width"]) * int(row["height"]) > DEFAULT_LIMITS.max_pixels,
        "too-many-pixels",
    ),
    ("no single range", lambda row: row["mode"] in {"F", "LAB"}, "unsupported-format"),
    # Its pixels can be had at a second attempt, which expected.csv made and nobody should.
    ("damage behind the first rows", lambda row: row["exif_orientation"] == "error", "undecodable"),
]

# What we read and Pillow does not: chunks that no pixel needs, and a JPEG without its end.
READ = {
    "pillow/apng/chunk_no_fctl.png",
    "pillow/png_decompression_dos.png",
    "pillow/truncated_jpeg.jpg",
    "pillow/unknown_compression_method.png",
}


def expected_reasons(row):
    """The reasons of which one is right; empty where the file must be accepted."""
    if row["path"] in READ or (row["path"] == "pillow/avif/hopper.heif" and has_heic()):
        return set()
    if row["status"] == "bomb":
        foreign = Path(row["path"]).suffix in {".jp2", ".ico"}
        return {"unsupported-format" if foreign else "too-many-pixels"}
    if row["status"] == "error":
        return {"unsupported-format", "undecodable", "too-many-pixels"}
    assert row["status"] == "ok"
    return {next((reason for _, covers, reason in RULES if covers(row)), None)} - {None}


@pytest.fixture(scope="module")
def corpus(shared_data):
    folder = shared_data / "nasty_images"
    with (folder / "expected.csv").open() as file:
        return folder, {row["path"]: row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def outcomes(corpus):
    """Returns path to outcome for each mode, by a child that the kernel ends if it grows or
    lingers.
    """
    return {mode: run_child(corpus[0], mode) for mode in ("exact", "fast")}


def run_child(folder, mode):
    script = Path(__file__).with_name("decode_folder.py")
    command = [sys.executable, script, folder, mode, str(MEMORY_BYTES), str(SECONDS_PER_FILE)]
    one_thread = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, env=one_thread
    )
    assert result.returncode == 0, f"{mode}: ended by {result.returncode} at {result.stderr[-300:]}"
    *files, peak = map(json.loads, result.stdout.splitlines())
    assert peak["peak_bytes"] < PEAK_BYTES
    return {outcome["path"]: outcome for outcome in files}


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_every_outcome_is_pillows_or_has_a_rule(corpus, outcomes, mode):
    _, rows = corpus
    assert len(rows) == 611
    wrong = []
    for path, row in rows.items():
        reasons = expected_reasons(row)
        got = outcomes[mode][path].get("reason")
        if got not in (reasons or {None}):
            wrong.append((path, got, reasons))
    assert wrong == []


def test_both_modes_accept_the_same_files_and_see_the_same_pictures(outcomes):
    exact, fast = outcomes["exact"], outcomes["fast"]
    assert {path: outcome.get("reason") for path, outcome in exact.items()} == {
        path: outcome.get("reason") for path, outcome in fast.items()
    }
    differences = {}
    for path, outcome in exact.items():
        if "pixels" in outcome:
            one, other = (
                np.frombuffer(bytes.fromhex(each["pixels"]), np.uint8)
                for each in (outcome, fast[path])
            )
            differences[path] = np.abs(one.astype(np.int64) - other).mean()
    # At 16 pixels a side every eighth is a coarse step; a wrong turn, crop or color would differ by
    # tens.
    assert max(differences.values()) < 2.5
    assert sum(difference > 0 for difference in differences.values()) > 40, (
        "the fast path was hardly taken"
    )
