import pytest
import torch
from torch.distributed import DistNetworkError, DistStoreError

from mlcd.errors import Unavailable
from mlcd.training.processes import Processes
from mlcd.world import World


@pytest.fixture
def one_of_two(monkeypatch):
    monkeypatch.setattr(Processes, "_describe_loss", lambda _, work: Unavailable(f"lost at {work}"))
    return Processes(World(size=2), torch.device("cpu"))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:47"),
        RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 15000ms for it"),
        RuntimeError("Application timeout caused pair closure"),
        DistNetworkError("failed to recv, got 0 bytes"),
        DistStoreError("wait timeout after 15000ms, keys: /rank"),
    ],
)
def test_a_process_that_does_not_answer_is_lost(one_of_two, error):
    with pytest.raises(Unavailable, match="lost at step 2"), one_of_two.watch(["step 2"]):
        raise error


def test_another_error_stays_what_it_is(one_of_two):
    with pytest.raises(RuntimeError, match="shapes"), one_of_two.watch(["step 2"]):
        raise RuntimeError("shapes cannot be multiplied")
