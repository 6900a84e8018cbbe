"""The replicated backbone: the same gradients as on one process, whatever each process has of a
micro-batch.
"""

import pytest
import torch

from mlcd.world import World
from tests.ranks import run_ranks
from tests.unit.training import replicas


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of what each number of processes found."""
    folder = tmp_path_factory.mktemp("ran")
    for size in (2, 3):
        run_ranks(replicas.run, size, str(folder))
    return folder


@pytest.mark.parametrize("size", [2, 3])
def test_processes_that_have_nothing_of_a_micro_batch_change_no_gradient(size, ran):
    """Nor does the split over processes: of one view, and of several with changes of color."""
    of_one, views_of_one = (
        [(sum(counts),) for counts in each[size]]
        for each in (replicas.COUNTS, replicas.VIEW_COUNTS)
    )
    whole = {
        "plain": replicas.gradients(replicas.new_state(World()), of_one),
        "views": replicas.view_gradients(World(), views_of_one),
    }
    for rank in range(size):
        found = torch.load(ran / f"gradients-{size}-{rank}.pt")
        assert found.keys() == whole.keys()
        for form, expected in whole.items():
            assert found[form].keys() == expected.keys()
            for name, gradient in expected.items():
                assert gradient.abs().max() > 0, (form, name)
                same = torch.allclose(found[form][name], gradient, rtol=1e-9, atol=1e-12)
                assert same, (form, name, rank)


def test_a_sharded_tower_gathers_blocks_in_the_type_that_is_asked_for(ran):
    """Weights at rest and gradients are float32, and the losses are those of autocast."""
    found = torch.load(ran / "sharded-0.pt")
    for gathered, (_, types) in found.items():
        assert types == (replicas.TYPES[gathered], torch.float32, torch.float32)
    (exact, _), (short, _) = found.values()
    assert short == pytest.approx(exact, rel=2e-3)
    assert short[2] < short[0]


def test_three_processes_sum_a_resumed_step_in_the_same_order(tmp_path):
    run_ranks(replicas.run_twice, 3, str(tmp_path))
    for rank in range(3):
        later, first = torch.load(tmp_path / f"both-{rank}.pt")
        for name, gradient in first.items():
            assert torch.equal(gradient, later[name]), name
