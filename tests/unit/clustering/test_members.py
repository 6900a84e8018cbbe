from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from mlcd.clustering.members import NearestMembers
from mlcd.world import World


class Threads:
    """One of several threads that share their work as processes would."""

    def __init__(self, rank, barrier, board):
        self.rank, self.size = rank, barrier.parties
        self._barrier, self._board = barrier, board

    def sum_integers(self, values):
        self._board[self.rank] = values
        self._barrier.wait(timeout=30)
        total = sum(self._board.values())
        self._barrier.wait(timeout=30)
        return total


def together(size, work):
    barrier, board = Barrier(size), {}
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, [Threads(rank, barrier, board) for rank in range(size)]))


def drawn(num_rows=500, num_centers=20):
    """Centers of very different sizes, some empty, and scores with many ties."""
    generator = np.random.default_rng(0)
    centers = np.minimum(generator.geometric(0.2, num_rows) - 1, num_centers - 2)
    return centers, np.round(generator.uniform(-1, 1, num_rows), 1)


def by_sorting(centers, scores, num_centers, num_each):
    """The definition: all members in order, the first few."""
    rows = np.full((num_centers, num_each), -1)
    for center in range(num_centers):
        members = sorted(np.flatnonzero(centers == center), key=lambda row: (-scores[row], row))[
            :num_each
        ]
        rows[center, : len(members)] = members
    return rows


@pytest.mark.parametrize("num_blocks", [1, 7, 500])
def test_they_are_the_first_of_all_members_in_order(num_blocks):
    centers, scores = drawn()
    found = NearestMembers(20, 3)
    for block in np.array_split(np.arange(500), num_blocks):
        found.add(centers[block], scores[block], block)
    assert (found.rows == by_sorting(centers, scores, 20, 3)).all()
    assert (found.scores == np.where(found.rows >= 0, scores[found.rows], -np.inf)).all()


def test_the_order_in_which_rows_come_does_not_matter():
    centers, scores = drawn()
    found = NearestMembers(20, 3)
    for block in np.array_split(np.random.default_rng(1).permutation(500), 9):
        found.add(centers[block], scores[block], block)
    assert (found.rows == by_sorting(centers, scores, 20, 3)).all()


def test_several_processes_find_what_one_finds():
    centers, scores = drawn()

    def share(world):
        found = NearestMembers(20, 3)
        own = np.arange(500)[world.rank :: world.size]
        found.add(centers[own], scores[own], own)
        found.gather(world)
        return found

    alone = share(World())
    for other in together(3, share):
        assert (other.rows == alone.rows).all()
        assert other.scores.tobytes() == alone.scores.tobytes()
