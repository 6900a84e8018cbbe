import time

import pytest

from studies.losses.stopwatch import Stopwatch


def test_time_adds_up_over_processes_that_are_handle_signal(tmp_path):
    path = tmp_path / "training.json"
    with pytest.raises(KeyboardInterrupt), Stopwatch(path):
        time.sleep(0.05)
        raise KeyboardInterrupt
    again = Stopwatch(path)
    first = again.wall_s
    assert first >= 0.05
    with again:
        time.sleep(0.02)
    assert again.wall_s >= first + 0.02
    assert Stopwatch(path).wall_s == again.wall_s
    assert 0 <= again.cpu_s < again.wall_s
