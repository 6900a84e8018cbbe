"""The steps of a curation; each leaves out images for one reason."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.center_levels import read_groups
from mlcd.artifacts.centers import Centers
from mlcd.artifacts.disk import replacing
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import Artifact
from mlcd.clustering.close_pairs import PairSearch
from mlcd.clustering.nearest import CenterScan
from mlcd.clustering.sampling import balanced, outliers
from mlcd.collections.duplicates import duplicate_groups
from mlcd.cores import available_cores
from mlcd.errors import ConfigInvalid
from mlcd.images.entries import Entries
from mlcd.images.pixel_issues import issues_of
from mlcd.images.prefetch import scores_all
from mlcd.images.source import Source
from mlcd.pipelines.curation.decisions import (
    DUPLICATE,
    LEAK,
    OUTLIER,
    SURPLUS,
    UNREADABLE,
    CurateOptions,
    Decisions,
    Keep,
)
from mlcd.pipelines.embedded_images import open_embedded_images
from mlcd.pipelines.encoded import PART_ENTRIES
from mlcd.progress import Meter, Stages
from mlcd.types import ISSUES, Embeddings, unit_rows

_DIGITS: Final = 6  # sums of cosines are rounded to: later digits vary between machines
_DUPLICATES_CHECKPOINT: Final = ".duplicates.npz"
_BLOCK_MEMBERS: Final = 4096  # members of a group in memory at a time


def leave_out_issues(
    embeddings: EmbeddingsArtifact,
    decisions: Decisions,
    options: CurateOptions,
    reporter: Stages,
    checkpoint_dir: Path | None,
) -> None:
    """Leaves out images that can no longer be read, and images with one of `options.issues`."""
    source, entries = open_embedded_images(embeddings)
    with reporter.stage("pixels", len(entries)) as meter:
        scores = image_scores(source, entries, meter=meter, checkpoint_dir=checkpoint_dir)
    has_issue = issues_of(scores)
    decisions.leave_out(np.flatnonzero(np.isnan(scores[:, 0])), UNREADABLE)
    for issue in ISSUES:
        if issue in options.issues:
            decisions.leave_out(np.flatnonzero(has_issue[issue]), issue)


def leave_out_leaks(
    embeddings: EmbeddingsArtifact,
    against: EmbeddingsArtifact,
    decisions: Decisions,
    options: CurateOptions,
    reporter: Stages,
) -> None:
    """Leaves out near duplicates of images of the other set."""
    if against.fingerprint != embeddings.fingerprint:
        raise ConfigInvalid(
            f"{against.artifact.path} and {embeddings.artifact.path} must be of the same model",
            remedy="embed both sets with one model",
        )
    assert options.leaks is not None
    sets = _TwoSets(embeddings, against)
    with reporter.stage("leaks", sets.num_rows) as meter:
        search = PairSearch(
            sets.num_rows,
            sets.take,
            options.leaks,
            num_own=embeddings.num_rows,
            tick=partial(meter.advance, 0),
        )
        for cell in range(search.cells.num_cells):
            for pairs in search.of_cell(cell):
                decisions.leave_out(np.unique(pairs.first), LEAK)
            meter.advance(len(search.cells.members(cell)))


def leave_out_duplicates(
    embeddings: EmbeddingsArtifact,
    decisions: Decisions,
    options: CurateOptions,
    reporter: Stages,
    checkpoint_dir: Path | None,
) -> None:
    """Leaves out all but one image of each group of near duplicates."""
    assert options.duplicates is not None
    rank, take = _choose_rank(embeddings, options.keep), embeddings.unit_rows_at
    checkpoint = None if checkpoint_dir is None else checkpoint_dir / _DUPLICATES_CHECKPOINT
    with reporter.stage("duplicates", embeddings.num_rows) as meter:
        groups = duplicate_groups(
            embeddings.num_rows, take, options.duplicates, meter=meter, checkpoint=checkpoint
        )
    for number, group in enumerate(groups):
        decisions.groups[group.rows] = number
        remaining = group.rows[decisions.keep[group.rows]]
        if len(remaining):
            best_member = rank(remaining).argmax()
            decisions.leave_out(np.delete(remaining, best_member), DUPLICATE)


def sample_clusters(
    embeddings: EmbeddingsArtifact,
    decisions: Decisions,
    options: CurateOptions,
    centers: Artifact,
) -> None:
    """Leaves out outliers, then the images that are not drawn into the sample."""
    read_centers = Centers.read(centers)
    if read_centers.fingerprint != embeddings.fingerprint:
        raise ConfigInvalid(
            f"{centers.path} and {embeddings.artifact.path} must be of the same model",
            remedy="cluster these embeddings",
        )
    levels = read_groups(centers)
    if options.hierarchical is not None and not levels:
        raise ConfigInvalid(
            f"a hierarchical sample needs levels of clusters, found none in {centers.path}",
            remedy="make them with `mlcd cluster --levels K,K,…`",
        )
    ids, distances = _find_nearest_centers(embeddings, read_centers)
    if options.outliers is not None:
        remaining = decisions.left
        out = outliers(ids[remaining], distances[remaining], options.outliers)
        decisions.leave_out(remaining[out], OUTLIER)
    remaining, num_drawn = decisions.left, options.balance
    groupings = [ids[remaining]]
    if options.hierarchical is not None:
        num_drawn = options.hierarchical
        groupings += [level[ids[remaining]] for level in levels]
    if num_drawn is not None:
        decisions.leave_out(remaining[~balanced(groupings, num_drawn, seed=options.seed)], SURPLUS)


@dataclass(frozen=True)
class _TwoSets:
    """The rows of two sets of embeddings, concatenated: `own`, then `others`."""

    own: EmbeddingsArtifact
    others: EmbeddingsArtifact

    @property
    def num_rows(self) -> int:
        return self.own.num_rows + self.others.num_rows

    def take(self, rows: NDArray[np.int64]) -> Embeddings:
        """Returns the unit rows of these ids, [n, D]."""
        vectors = np.empty((len(rows), self.own.dimension), np.float32)
        own = rows < self.own.num_rows
        vectors[own] = self.own.unit_rows_at(rows[own])
        vectors[~own] = self.others.unit_rows_at(rows[~own] - self.own.num_rows)
        return vectors


def _find_nearest_centers(
    embeddings: EmbeddingsArtifact, centers: Centers
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Returns the id of each row's nearest center, [N], and the distance to it, [N]."""
    scan = CenterScan(centers.vectors, matmul="numpy")
    ids = np.empty(embeddings.num_rows, np.int32)
    distances = np.empty(embeddings.num_rows, np.float32)
    for start, block in embeddings.blocks():
        nearest = scan.nearest(centers.align(unit_rows(block)), 1)
        rows = slice(start, start + len(block))
        ids[rows], distances[rows] = nearest.ids[:, 0], 1 - nearest.scores[:, 0]
    return ids, distances


# rank(row ids [n]) returns scores [n]: the image with the highest is kept, of ties the first
_Rank: TypeAlias = Callable[[NDArray[np.int64]], NDArray[np.float64]]


def _choose_rank(embeddings: EmbeddingsArtifact, keep: Keep) -> _Rank:
    if keep == "largest":
        return _read_file_sizes(embeddings).__getitem__
    if keep == "best":
        return lambda members: _sum_cosines(members, embeddings)
    return lambda members: np.zeros(len(members))


def _sum_cosines(members: NDArray[np.int64], embeddings: EmbeddingsArtifact) -> NDArray[np.float64]:
    """Returns the sum of each member's cosines with all members, [n]."""
    parts = [
        members[start : start + _BLOCK_MEMBERS] for start in range(0, len(members), _BLOCK_MEMBERS)
    ]

    def rows(part: NDArray[np.int64]) -> NDArray[np.float64]:
        return embeddings.unit_rows_at(part).astype(np.float64)

    total = np.sum([rows(part).sum(axis=0) for part in parts], axis=0)
    sums = [np.einsum("nd,d->n", rows(part), total) for part in parts]
    return np.round(np.concatenate(sums), _DIGITS)


def _read_file_sizes(embeddings: EmbeddingsArtifact) -> NDArray[np.float64]:
    """Returns the size of each image's file in bytes, [N]. Raises NotFound for missing images."""
    _, entries = open_embedded_images(embeddings)
    return np.fromiter(entries.sizes_bytes(), np.float64, len(entries))


def image_scores(
    source: Source, entries: Entries, *, meter: Meter, checkpoint_dir: Path | None
) -> NDArray[np.float64]:
    """Returns the pixel scores of each image, [N, 6]; NaN for an image that cannot be used.

    checkpoint_dir: folder for the scores of finished parts, from which a repeated call resumes;
    None disables it.
    """
    scores = np.full((len(entries), len(ISSUES)), np.nan)
    for start in range(0, len(entries), PART_ENTRIES):
        part = slice(start, min(start + PART_ENTRIES, len(entries)))
        checkpoint = None if checkpoint_dir is None else checkpoint_dir / f".scores-{start:09d}.npy"
        if checkpoint is not None and checkpoint.is_file():
            scores[part] = np.load(checkpoint, allow_pickle=False)
            meter.advance(part.stop - part.start)
            continue
        scored_images = scores_all(source, entries[part], num_threads=available_cores())
        for row, score in enumerate(scored_images, start):
            if score is not None:
                scores[row] = score
            meter.advance()
        if checkpoint is not None:
            with replacing(checkpoint) as temporary, temporary.open("wb") as file:
                np.save(file, scores[part], allow_pickle=False)
    return scores
