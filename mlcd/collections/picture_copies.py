"""Finds copies of pictures in a collection: embeddings propose pairs, thumbnails confirm them.

Proposed are the pairs of highest cosine, about 8 per item for any model; a comparison of the
thumbnails decides (`mlcd.images.likeness`). A pair without both thumbnails is a copy if its cosine
is at least `DEFAULT_SIMILARITY`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.cells import Take
from mlcd.clustering.close_pairs import ClosePairs
from mlcd.clustering.heads import main_directions
from mlcd.collections.duplicates import DEFAULT_SIMILARITY, DistinctRows, Group
from mlcd.collections.port import CollectionPort
from mlcd.images.likeness import (
    COARSE_SIDE,
    FINE_SIDE,
    LEAST_COARSE,
    LEAST_FINE,
    best_fits,
    coarse_spectra,
    coarse_views,
    fine_scores,
    gray_picture,
)
from mlcd.progress import Meter
from mlcd.types import Embeddings

_PAIRS_PER_ROW: Final = 8
_MOST_PER_ROW: Final = 32  # bound if the sample underestimates the number of pairs
_LEAST_COSINE: Final = 0.5  # no copy of 200 photographs had a lower cosine, with any model
_SAMPLED_ROWS: Final = 512
_BLOCK_ROWS: Final = 8192
_TILE_ROWS: Final = 2048
# Principal directions. They propose pairs as good as those of whole rows, with a tenth of the work.
_DIRECTIONS: Final = 128
_READ_ROWS: Final = 1024  # thumbnails in memory at once, 3 kB each
_VIEWED_ROWS: Final = 128  # rows whose views are in memory at once, 40 kB each
_FINE_PAIRS: Final = 256
_TINY: Final = 1e-6

_Rows = NDArray[np.int64]
# read(rows) returns the thumbnail of each row, None for a row without one
ReadThumbnails = Callable[[_Rows], Sequence[bytes | None]]


def thumbnails_of(collection: CollectionPort, ids: Sequence[str]) -> ReadThumbnails:
    """Returns a function that reads the thumbnails of rows. ids: ids of all rows."""

    def read(rows: _Rows) -> list[bytes | None]:
        row_ids = [ids[row] for row in rows.tolist()]
        thumbnails = collection.read_thumbnails(row_ids)
        return [thumbnails[item_id].data if item_id in thumbnails else None for item_id in row_ids]

    return read


@dataclass(frozen=True)
class FoundCopies:
    """The groups of copies. nearest: the closest pair if no group exists."""

    groups: list[Group]
    nearest: Group | None


def copy_groups(num_rows: int, take: Take, read: ReadThumbnails, *, meter: Meter) -> FoundCopies:
    """Returns all groups of unit rows whose pictures are copies, ordered by their first row.

    Uses 1.3 kB of memory per row of a proposed pair. The meter is called often, and may raise.
    """
    distinct = DistinctRows.of(num_rows, take)
    proposed = propose_pairs(len(distinct), distinct.take, meter=meter)
    pictures = _Pictures(lambda rows: read(distinct.rows[rows]), proposed, meter)
    is_copy = pictures.are_copies(proposed)
    groups = distinct.groups(_select(proposed, np.flatnonzero(is_copy)))
    return FoundCopies(groups, None if groups else _best(proposed, pictures.coarse, distinct))


def nearest_pair(num_rows: int, take: Take, *, meter: Meter) -> Group | None:
    """Returns the pair of rows of the highest cosine; None if no cosine is 0.5 or more."""
    distinct = DistinctRows.of(num_rows, take)
    proposed = propose_pairs(len(distinct), distinct.take, meter=meter)
    return _best(proposed, proposed.similarities, distinct)


def propose_pairs(num_rows: int, take: Take, *, meter: Meter) -> ClosePairs:
    """Returns the pairs of highest cosine, about 8 per row.

    Pairs are chosen by the cosine of the rows projected to their principal directions; the returned
    similarities are cosines of whole rows.
    """
    heads = _project_rows(num_rows, take)
    threshold = _estimate_threshold(heads)
    max_pairs, num_pairs, parts = _MOST_PER_ROW * num_rows, 0, list[ClosePairs]()
    for start in range(0, num_rows, _TILE_ROWS):
        block = heads[start : start + _TILE_ROWS]
        for start_of_second in range(start, num_rows, _TILE_ROWS):
            meter.advance(0)
            cosines = block @ heads[start_of_second : start_of_second + _TILE_ROWS].T
            is_near = cosines >= threshold
            if start_of_second == start:
                is_near = np.triu(is_near, 1)
            first, second = np.nonzero(is_near)
            similarities = cosines[first, second].astype(np.float64)
            parts.append(ClosePairs(first + start, second + start_of_second, similarities))
            num_pairs += len(first)
            if num_pairs > 2 * max_pairs:
                parts = [_keep_highest(ClosePairs.joined(parts), max_pairs)]
                num_pairs = max_pairs
        meter.advance(len(block))
    if not parts:
        return _NO_PAIRS
    chosen = _keep_highest(ClosePairs.joined(parts), max_pairs)
    cosines = np.empty(len(chosen.first))
    for start in range(0, len(cosines), _TILE_ROWS):
        rows = slice(start, start + _TILE_ROWS)
        left, right = take(chosen.first[rows]), take(chosen.second[rows])
        cosines[rows] = np.einsum("nd,nd->n", left, right)
    return ClosePairs(chosen.first, chosen.second, cosines)


def _project_rows(num_rows: int, take: Take) -> Embeddings:
    """Returns the rows projected to their principal directions, scaled to norm 1: [N, 128]."""
    if not num_rows:
        return np.empty((0, 1), np.float32)
    basis = main_directions(take(np.arange(0, num_rows, -(-num_rows // 4096))), _DIRECTIONS)
    heads = np.empty((num_rows, basis.shape[1]), np.float32)
    for start in range(0, num_rows, _BLOCK_ROWS):
        rows = take(np.arange(start, min(start + _BLOCK_ROWS, num_rows))) @ basis
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        heads[start : start + len(rows)] = rows / np.maximum(lengths, _TINY)
    return heads


class _Pictures:
    """The thumbnails of proposed pairs. coarse: score of each pair in the coarse comparison."""

    def __init__(self, read: ReadThumbnails, proposed: ClosePairs, meter: Meter) -> None:
        self._read, self._meter = read, meter
        self._rows = np.unique(np.concatenate([proposed.first, proposed.second]))
        self._small = np.zeros((len(self._rows), COARSE_SIDE, COARSE_SIDE), np.uint8)
        self._has_picture = np.zeros(len(self._rows), np.bool_)
        for start in range(0, len(self._rows), _READ_ROWS):
            block = slice(start, start + _READ_ROWS)
            pictures = self._read_gray(self._rows[block], COARSE_SIDE)
            self._small[block], self._has_picture[block] = pictures
        self.coarse: NDArray[np.float32] = np.full(len(proposed.first), -1, np.float32)

    def are_copies(self, pairs: ClosePairs) -> NDArray[np.bool_]:
        """Returns for each pair whether its pictures are copies, bool [pairs]."""
        first = np.searchsorted(self._rows, pairs.first)
        second = np.searchsorted(self._rows, pairs.second)
        num = len(first)
        has_both = self._has_picture[first] & self._has_picture[second]
        # Each pair is compared twice: the second picture as a part of the first, and vice versa.
        parts, wholes = np.concatenate([second, first]), np.concatenate([first, second])
        scores, views, mirrored = self._compare_coarsely(parts, wholes)
        is_reversed = scores[num:] > scores[:num]
        chosen = np.arange(num) + np.where(is_reversed, num, 0)
        self.coarse = np.where(has_both, scores[chosen], -1)
        is_copy = ~has_both & (pairs.similarities >= DEFAULT_SIMILARITY)
        candidates = np.flatnonzero(has_both & (self.coarse >= LEAST_COARSE))
        for start in range(0, len(candidates), _FINE_PAIRS):
            pair_indices = candidates[start : start + _FINE_PAIRS]
            edges = chosen[pair_indices]
            part_pictures, _ = self._read_gray(self._rows[parts[edges]], FINE_SIDE)
            whole_pictures, _ = self._read_gray(self._rows[wholes[edges]], FINE_SIDE)
            whole_pictures = np.where(
                mirrored[edges, None, None], whole_pictures[:, :, ::-1], whole_pictures
            )
            fine = fine_scores(part_pictures, whole_pictures, views[edges])
            is_copy[pair_indices] = fine >= LEAST_FINE
        return is_copy

    def _compare_coarsely(
        self, parts: _Rows, wholes: _Rows
    ) -> tuple[NDArray[np.float32], _Rows, NDArray[np.bool_]]:
        """Returns score, view and mirroring of each part's best fit into its whole. The views of a
        part are computed once for all its wholes.
        """
        spectra = np.concatenate(
            [
                coarse_spectra(self._small[start : start + _READ_ROWS]).astype(np.float16)
                for start in range(0, len(self._small), _READ_ROWS)
            ]
            or [np.empty((0, 1), np.float16)]
        )
        scores = np.empty(len(parts), np.float32)
        views, mirrored = np.empty(len(parts), np.int64), np.empty(len(parts), np.bool_)
        order = np.argsort(parts, kind="stable")
        starts = np.searchsorted(parts[order], np.arange(len(self._rows) + 1))
        for start in range(0, len(self._rows), _VIEWED_ROWS):
            self._meter.advance(0)
            for row, part_views in enumerate(
                coarse_views(self._small[start : start + _VIEWED_ROWS]), start
            ):
                edges = order[starts[row] : starts[row + 1]]
                fits = best_fits(part_views, spectra[wholes[edges]].astype(np.float32))
                scores[edges], views[edges] = fits.scores, fits.views
                mirrored[edges] = fits.mirrored
        return scores, views, mirrored

    def _read_gray(self, rows: _Rows, side: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Returns the gray pictures, [n, side, side], and whether each row has one, [n]."""
        self._meter.advance(0)
        pictures = np.zeros((len(rows), side, side), np.uint8)
        has_picture = np.zeros(len(rows), np.bool_)
        unique, unique_indices = np.unique(rows, return_inverse=True)
        decoded = [
            None if data is None else gray_picture(data, side) for data in self._read(unique)
        ]
        for index, unique_index in enumerate(unique_indices.tolist()):
            if (picture := decoded[unique_index]) is not None:
                pictures[index], has_picture[index] = picture, True
        return pictures, has_picture


def _estimate_threshold(rows: Embeddings) -> float:
    """Returns the cosine that about 8 pairs per row reach, estimated from a sample of rows."""
    num_rows = len(rows)
    chosen = np.random.default_rng(0).choice(num_rows, min(num_rows, _SAMPLED_ROWS), replace=False)
    sampled = rows[np.sort(chosen)]
    edges = np.linspace(-1, 1, 2001)
    counts = np.zeros(len(edges) - 1, np.int64)
    for start in range(0, num_rows, _BLOCK_ROWS):
        cosines = sampled @ rows[start : start + _BLOCK_ROWS].T
        counts += np.histogram(np.clip(cosines, -1, 1), edges)[0]
    num_above = np.cumsum(counts[::-1]) - len(sampled)  # without each row's cosine with itself
    # Each pair counts for both of its rows.
    num_bins = int((num_above <= 2 * _PAIRS_PER_ROW * len(sampled)).sum())
    cosine = float(edges[::-1][min(num_bins, len(counts))])
    return min(max(cosine, _LEAST_COSINE), DEFAULT_SIMILARITY)


def _keep_highest(pairs: ClosePairs, num: int) -> ClosePairs:
    if len(pairs.first) <= num:
        return pairs
    return _select(pairs, np.argpartition(-pairs.similarities, num)[:num])


def _select(pairs: ClosePairs, chosen: _Rows) -> ClosePairs:
    return ClosePairs(pairs.first[chosen], pairs.second[chosen], pairs.similarities[chosen])


def _best(pairs: ClosePairs, scores: NDArray[np.floating], distinct: DistinctRows) -> Group | None:
    """Returns the pair of the highest score; ties go to the highest cosine."""
    if not len(pairs.first):
        return None
    best = np.lexsort((pairs.similarities, scores))[-1:]
    return distinct.groups(_select(pairs, best))[0]


_NO_PAIRS: Final = ClosePairs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float64))
