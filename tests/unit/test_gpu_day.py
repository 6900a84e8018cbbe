"""`make gpu`, as far as a machine without a GPU can test it."""

import json

import pytest

from benchmarks.gpu import MAX_WHEEL_BYTES, SLICES, Slice, check_wheels, run, table, write


def test_every_slice_has_a_name_and_a_limit_below_ten_minutes():
    assert len({piece.name for piece in SLICES}) == len(SLICES)
    slow = Slice("slow", ("-c", "print('begun', flush=True); import time; time.sleep(60)"))
    result = run(slow, limit_s=2)
    assert (result["status"], result["seconds"] < 30) == ("time limit", True)


def test_a_result_states_where_it_is_from_and_stands_in_the_table(tmp_path):
    passed = run(Slice("good", ("-c", "print('12 images/s | x')")))
    failed = run(Slice("bad", ("-c", "raise SystemExit(3)")))
    stored = json.loads(write(passed, tmp_path / "results").read_text())
    assert stored["output"] == ["12 images/s | x"]
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
