"""The recording of calls, with a stand-in for CUDA; on a GPU the encoder's and the scan's tests run
it.
"""

from contextlib import contextmanager

import pytest
import torch

from mlcd.cuda_graphs import Recordings

CUDA = torch.device("cuda")


class StandIn:
    """Counts warm-ups, recordings and replays. fault: raised by each recording."""

    def __init__(self, monkeypatch):
        self.fault, self.is_recording, self.stream = None, False, "original"
        self.recorded, self.replayed, self.plain = [], [], []
        stand_in = self

        class Stream:
            def __init__(self, device=None):
                self.device = device

            def wait_stream(self, other): ...

        class Graph:
            def replay(self):
                stand_in.replayed.append(self.key)

        @contextmanager
        def record(graph, pool, capture_error_mode):
            assert (pool, capture_error_mode) == ("pool", "thread_local")
            stand_in.stream = "recording"  # torch leaves it so if the recording fails
            if stand_in.fault is not None:
                raise stand_in.fault
            stand_in.is_recording, stand_in.graph = True, graph
            yield
            stand_in.is_recording, stand_in.stream = False, "original"

        for name, value in {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "graph": record,
            "current_stream": lambda device: Stream(),
            "stream": contextmanager(lambda stream: iter([None])),
            "set_stream": lambda stream: setattr(stand_in, "stream", "original"),
            "synchronize": lambda device: None,
            "graph_pool_handle": lambda: "pool",
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def call(self, key):
        if self.is_recording:
            self.graph.key = key
            self.recorded.append(key)
        else:
            self.plain.append(key)
        return f"rows {key}"


@pytest.fixture
def cuda(monkeypatch):
    return StandIn(monkeypatch)


def test_each_call_is_recorded_once_and_then_replayed(cuda):
    recordings = Recordings[int, str](CUDA)
    found = [recordings.run(key, lambda key=key: cuda.call(key)) for key in (4, 8, 4, 4)]
    assert found == ["rows 4", "rows 8", "rows 4", "rows 4"]
    assert (cuda.recorded, cuda.replayed) == ([4, 8], [4, 8, 4, 4])
    assert cuda.plain == [4] * 3 + [8] * 3  # before each recording
    recordings.forget(lambda key: key > 4)
    assert recordings.keys == [4]
    recordings.run(8, lambda: cuda.call(8))
    assert cuda.recorded == [4, 8, 8]


def test_calls_run_plainly_once_a_recording_has_failed(cuda):
    recordings = Recordings[int, str](CUDA)
    recordings.run(4, lambda: cuda.call(4))
    cuda.fault = RuntimeError("operation not permitted when stream is capturing")
    with pytest.warns(RuntimeWarning, match="without CUDA graphs, which is slower: operation not"):
        assert recordings.run(8, lambda: cuda.call(8)) == "rows 8"
    assert cuda.stream == "original"
    cuda.fault = None
    cuda.plain.clear()
    assert recordings.run(8, lambda: cuda.call(8)) == "rows 8"
    assert cuda.plain == [8]
    recordings.run(4, lambda: cuda.call(4))
    assert (cuda.recorded, cuda.replayed) == ([4], [4, 4])


def test_without_memory_a_later_call_may_be_recorded(cuda):
    recordings = Recordings[int, str](CUDA)
    cuda.fault = torch.cuda.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        recordings.run(8, lambda: cuda.call(8))
    assert cuda.stream == "original"
    cuda.fault = None
    recordings.run(4, lambda: cuda.call(4))
    assert recordings.keys == [4]


def test_a_cpu_records_nothing():
    recordings = Recordings[int, int](torch.device("cpu"))
    assert [recordings.run(1, lambda num=num: num) for num in (5, 6)] == [5, 6]
    assert recordings.keys == []
