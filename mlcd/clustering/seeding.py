"""Finds the initial centers of k-means: distinct rows drawn by a hash of (seed, row), or centers
found in two levels.

Two levels: a sample is divided into about sqrt(k) coarse cells, the centers are distributed over
the cells by their distinct rows, and each cell is clustered separately. Lloyd's passes over all
rows then start near the optimum.
"""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.nearest_center import NearestCenter
from mlcd.clustering.rows import BLOCK_ROWS, ArrayRows, Rows, SelectedRows, lowest_hashed
from mlcd.errors import InvalidInput
from mlcd.types import Embeddings
from mlcd.world import World

_READ_TOGETHER: Final = 4096
SAMPLE_PER_CENTER: Final = 32  # rows of the two-level sample for each center wanted
_COARSE_SAMPLE: Final = 256  # rows of the sample for each coarse cell
_SAMPLE_STREAM: Final = (
    1  # second hash counter, so that the sample differs from the initial centers
)

# k-means of one level: (rows, number of clusters, seed) to centers
Cluster = Callable[[Rows, int, int], Embeddings]


def distinct_rows(rows: Rows, num_clusters: int, seed: int) -> Embeddings:
    """Returns [K, D]: the first K rows in the order of hash(seed, row) that differ from each other.

    Raises InvalidInput if there are fewer distinct rows than clusters.
    """
    chosen = np.empty((min(num_clusters, rows.num_rows), rows.dimension), dtype=np.float32)
    contents: set[bytes] = set()
    for candidate in _in_hash_order(rows, num_clusters, seed):
        if (content := (candidate + 0.0).tobytes()) not in contents:
            chosen[len(contents)] = candidate
            contents.add(content)
            if len(contents) == num_clusters:
                return chosen
    raise InvalidInput(
        f"{num_clusters} clusters were asked of {len(contents)} distinct embeddings",
        remedy=f"ask for at most {len(contents)} clusters",
    )


def two_level(
    rows: Rows, num_clusters: int, seed: int, cluster: Cluster, world: World
) -> Embeddings:
    """Returns [K, D]: centers of the cells of a sample. The processes of `world` share the cells.

    Raises InvalidInput when there are fewer distinct rows than clusters.
    """
    sample = sampled(rows, SAMPLE_PER_CENTER * num_clusters, seed)
    num_coarse = max(2, round(num_clusters**0.5))
    sample_rows = _load_rows(sampled(sample, _COARSE_SAMPLE * num_coarse, seed + 1))
    num_coarse = min(num_coarse, _num_distinct(sample_rows))
    coarse = world.broadcast(cluster(sample_rows, num_coarse, seed))  # CPUs may round differently
    del sample_rows
    cell_of, content_of = _cells(sample, coarse)
    num_distinct = _distinct_per_cell(cell_of, content_of, num_coarse)
    if num_distinct.sum() < num_clusters:
        return distinct_rows(rows, num_clusters, seed)
    # by distinct rows: where one is repeated many times, its cell needs no more centers for it
    shares = shared_out(num_clusters, num_distinct, num_distinct)
    firsts = np.concatenate([[0], np.cumsum(shares)])
    centers = np.zeros((num_clusters, rows.dimension), dtype=np.float32)
    for cell in range(world.rank, num_coarse, world.size):
        if shares[cell]:
            members: Rows = SelectedRows(sample, np.flatnonzero(cell_of == cell))
            # these rows take no more memory than the centers
            if members.num_rows <= max(num_clusters, BLOCK_ROWS):
                members = _load_rows(members)
            centers[firsts[cell] : firsts[cell + 1]] = cluster(members, int(shares[cell]), seed)
    # Each row is zero in all processes but one, so the sum of the bits is the row of that process.
    bits: Embeddings = world.sum_integers(centers.view(np.int32)).view(np.float32)
    return bits


def shared_out(num: int, mass: NDArray[np.int64], limit: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the share of `num` that each cell gets, by mass and largest remainder.

    A nonempty cell gets at least 1, and no cell more than its limit. The sum is `num`, which must
    be between the number of cells with rows and the sum of the limits.
    """
    shares = np.minimum((mass > 0).astype(np.int64), limit)
    while (num_open := num - int(shares.sum())) > 0:
        open_cells = shares < limit
        exact = np.where(open_cells, mass, 0) * (num_open / mass[open_cells].sum())
        floor_shares = np.minimum(np.floor(exact).astype(np.int64), limit - shares)
        shares += floor_shares
        num_open -= int(floor_shares.sum())
        remainders = np.where(shares < limit, exact - np.floor(exact), -1.0)
        for cell in np.argsort(-remainders, kind="stable")[
            : min(num_open, int((remainders >= 0).sum()))
        ]:
            shares[cell] += 1
    return shares


def sampled(rows: Rows, num_wanted: int, seed: int) -> Rows:
    """Returns the `num_wanted` rows of lowest hash, in ascending order; all rows if there are no
    more.
    """
    if num_wanted >= rows.num_rows:
        return rows
    return SelectedRows(
        rows, np.sort(lowest_hashed(rows.num_rows, num_wanted, seed, _SAMPLE_STREAM))
    )


def _load_rows(rows: Rows) -> Rows:
    return ArrayRows([rows.read(np.arange(rows.num_rows))])


def _in_hash_order(rows: Rows, num_clusters: int, seed: int) -> Iterator[Embeddings]:
    """Yields rows in the order of their hashes and reads more only after duplicates."""
    num_wanted, done = num_clusters, 0
    while done < rows.num_rows:
        order = lowest_hashed(rows.num_rows, num_wanted, seed)
        for start in range(done, len(order), _READ_TOGETHER):
            yield from rows.read(order[start : start + _READ_TOGETHER])
        done, num_wanted = len(order), 4 * num_wanted


def _cells(sample: Rows, coarse: Embeddings) -> tuple[NDArray[np.int32], NDArray[np.uint64]]:
    """Returns the nearest coarse center of each row, and a hash of its content."""
    nearest = NearestCenter(coarse).nearest
    cells = np.empty(sample.num_rows, dtype=np.int32)
    contents = np.empty(sample.num_rows, dtype=np.uint64)
    for start, block in sample.blocks(0, sample.num_rows):
        own = slice(start, start + len(block))
        cells[own] = nearest(block)
        contents[own] = _content_hashes(block)
    return cells, contents


def _num_distinct(rows: Rows) -> int:
    hashes = [_content_hashes(block) for _, block in rows.blocks(0, rows.num_rows)]
    return len(np.unique(np.concatenate(hashes)))


def _content_hashes(block: Embeddings) -> NDArray[np.uint64]:
    multipliers = (
        np.random.default_rng(0).integers(2**63, size=block.shape[1], dtype=np.uint64) * 2 + 1
    )
    words = (block + 0.0).view(np.uint32)
    hashes: NDArray[np.uint64] = np.einsum("nd,d->n", words, multipliers)  # `@` copies the words
    return hashes


def _distinct_per_cell(
    cells: NDArray[np.int32], contents: NDArray[np.uint64], num_cells: int
) -> NDArray[np.int64]:
    order = np.lexsort((contents, cells))
    cells, contents = cells[order], contents[order]
    new = np.concatenate([[True], (cells[1:] != cells[:-1]) | (contents[1:] != contents[:-1])])
    return np.bincount(cells[new], minlength=num_cells)
