"""The nearest members of each final center, and the distance within which most members lie.

The final centers are only known after clustering, so the rows are read once more.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.examples import Examples
from mlcd.clustering.exact_scores import exact_scores
from mlcd.clustering.kmeans import KMeansResult
from mlcd.clustering.kmeans_plan import MEASURED_EACH
from mlcd.clustering.members import NOVELTY_QUANTILE, NearestMembers
from mlcd.clustering.novelty import own_quantiles
from mlcd.clustering.rows import Rows, lowest_hashed
from mlcd.world import World

_MEASURED_STREAM: Final = 3  # first counter of the hash that samples rows


@dataclass(frozen=True)
class SeenMembers:
    """The nearest members of each center, and the distances of a sample of all rows.

    measured: ids of the sampled rows, ascending. distances: 1 - cosine of each sampled row to its
    center.
    """

    nearest: NearestMembers
    measured: NDArray[np.int64]
    distances: NDArray[np.float32]

    @classmethod
    def of(cls, rows: Rows, result: KMeansResult, num_each: int, world: World) -> "SeenMembers":
        """Reads this process's share of the unit rows. num_each: nearest members per center."""
        num_centers = len(result.centers)
        nearest = NearestMembers(num_centers, max(1, num_each))
        measured = np.sort(
            lowest_hashed(rows.num_rows, MEASURED_EACH * num_centers, _MEASURED_STREAM)
        )
        distances = np.zeros(len(measured), np.float32)
        start, stop = world.own_rows(rows.num_rows)
        for first, block in rows.blocks(start, stop):
            centers = result.assignment[first - start :][: len(block)]
            scores = exact_scores(block, result.centers, np.arange(len(block)), centers)
            # Rows are unit only within the rounding of float16, which a cosine would show.
            cosines = scores / np.linalg.norm(block.astype(np.float64), axis=1)
            nearest.add(centers, cosines, np.arange(first, first + len(block)))
            part = slice(*np.searchsorted(measured, [first, first + len(block)]))
            distances[part] = 1 - cosines[measured[part] - first]
        nearest.gather(world)
        # Every other process has zeros in these places, so the sum of the bits is exact.
        bits = world.sum_integers(distances.view(np.int32))
        return cls(nearest, measured, bits.view(np.float32))

    def examples(
        self, embeddings: EmbeddingsArtifact, row_ids: NDArray[np.int64] | None
    ) -> Examples:
        """Returns the keys of the nearest members.

        row_ids: ids of the clustered rows in the embeddings; None for all.
        """
        present = self.nearest.rows >= 0
        rows = self.nearest.rows[present]
        keys = embeddings.keys_at(rows if row_ids is None else row_ids[rows])
        scores = self.nearest.scores[present].astype(np.float32)
        return Examples.of(keys, present.sum(axis=1), scores)

    def quantiles(self, result: KMeansResult, assignment: NDArray[np.int32]) -> NDArray[np.float32]:
        """Returns the distance within which 95 % of each center's members lie.

        assignment: the center of every row.
        """
        lengths = result.sizes.astype(np.float64) * np.nan_to_num(result.cosines)
        own = assignment[self.measured]
        return own_quantiles(own, self.distances, len(lengths), NOVELTY_QUANTILE, lengths)
