import numpy as np
import pytest

from mlcd.clustering.kmeans import kmeans
from tests.ranks import run_ranks
from tests.unit.clustering import processes


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    for size in (1, 2, 3):
        run_ranks(processes.run, size, str(folder))
    return {
        (size, rank): dict(np.load(folder / f"{size}-{rank}.npz"))
        for size in (1, 2, 3)
        for rank in range(size)
    }


@pytest.mark.parametrize("name", ["flat", "sizes", "objective", "deep", "mean"])
def test_one_two_and_three_processes_agree_bit_for_bit(results, name):
    assert len({result[name].tobytes() for result in results.values()}) == 1


def test_they_agree_with_a_process_that_never_saw_torch(results):
    alone = kmeans([processes.rows()], 40, iterations=4)
    assert results[3, 1]["flat"].tobytes() == alone.centers.tobytes()
    parts = [results[3, rank]["assignment"] for rank in range(3)]
    assert (np.concatenate(parts) == alone.assignment).all()


def test_all_get_what_the_first_has_and_different_centers_are_noticed(results):
    assert all(result["shared"] == 0 for result in results.values())
    assert all(result["refused"] for (size, _), result in results.items() if size > 1)
