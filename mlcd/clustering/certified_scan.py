"""A scan of one arithmetic, with a proof for each row: see `mlcd.clustering.nearest`.

Shapes: B rows of a batch, K centers, C centers of a block, D dimension.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.arithmetics import BLOCK_CENTERS, MatmulName, open_matmul
from mlcd.clustering.candidates import Candidates, first_of_each
from mlcd.clustering.certificate import DOUBLE_MARGIN, Norms, Slack, beyond_reach
from mlcd.clustering.exact_scores import ExactScores
from mlcd.clustering.matmul import single_scores
from mlcd.types import Embeddings

_RAISED_EVERY: Final = 4  # blocks, then 4 times as many, until the threshold is raised again


@dataclass(frozen=True)
class CertifiedAnswers:
    """Ids and scores [B, top], and whether they are proven to be the answer, [B].

    The scores are in float64. Where they are wanted in float32 alone, a shortlist's may have been
    summed in another order: that changes neither their order nor what float32 makes of them.
    """

    ids: NDArray[np.int64]
    scores: NDArray[np.float64]
    proven: NDArray[np.bool_]


@dataclass(frozen=True)
class _Known:
    """Distinct ids of centers [B, top] and their exact scores; -1 and -inf for none."""

    ids: NDArray[np.integer]
    scores: NDArray[np.float64]

    @classmethod
    def of(cls, ids: NDArray[np.integer], exact: ExactScores) -> "_Known":
        return cls(ids, exact.of_each(ids))

    def least(self) -> NDArray[np.float64]:
        """Returns a bound of the last score of each row's answer from below, [B]."""
        least_B: NDArray[np.float64] = self.scores.min(axis=1)
        return least_B

    def beyond(self, slack: Slack) -> NDArray[np.float32]:
        """Returns a threshold at or below which no product belongs to a center as near as the last
        of these.
        """
        return beyond_reach(self.least() - slack.offset, slack.with_any)


class CertifiedScan:
    """The centers in one arithmetic, and their lengths in it."""

    def __init__(self, name: MatmulName, centers: Embeddings) -> None:
        """Raises ConfigInvalid where torch is not installed."""
        self.centers, self.name = centers, name
        self.matmul = open_matmul(name, centers, BLOCK_CENTERS)
        self.norms = Norms.of(centers, self.matmul)

    def find(
        self,
        top: int,
        kept: int,
        z_BD: Embeddings,
    ) -> CertifiedAnswers:
        """Returns the first `top` centers of each row, and for which rows they are proven.

        kept: the candidates of a row.
        """
        rows = self.matmul.load(z_BD)
        slack = Slack.of(rows, self.matmul.rounding, self.norms)
        candidates = Candidates(len(z_BD), kept)
        exact = ExactScores(z_BD, self.centers)
        known = self._scan(exact, rows.data, slack, candidates, top)
        ids, scores = self._rescored(exact, candidates, known, slack)
        left_out_B = candidates.threshold.astype(np.float64) + slack.with_any
        last_B = scores[:, -1] - slack.offset - DOUBLE_MARGIN
        # With every center kept, nothing is left out: the threshold is -inf, and so is its bound.
        proven_B = (left_out_B < last_B) & (ids[:, -1] >= 0) & slack.holds()
        return CertifiedAnswers(ids, scores, proven_B)

    def _scan(
        self,
        exact: ExactScores,
        rows: Any,
        slack: Slack,
        candidates: Candidates,
        top: int,
    ) -> _Known:
        """Collects the centers whose product is within reach of the answer, and returns some of
        the nearest.
        """
        matmul, rounding, slack_B = self.matmul, self.matmul.rounding, slack.with_any
        reached_B, next_raise, num_centers = None, _RAISED_EVERY, len(self.centers)
        for number, start in enumerate(range(0, num_centers, BLOCK_CENTERS)):
            stop = min(start + BLOCK_CENTERS, num_centers)
            product_BC = matmul.multiply(rows, start, stop)
            if number == 0 and stop >= top:
                reached_B = matmul.reached(product_BC, top)
                candidates.pass_over(beyond_reach(reached_B.astype(np.float64) - slack_B, slack_B))
            if number == 0 and reached_B is not None and rounding.inputs and stop < num_centers:
                leaders = self._leaders(exact, product_BC, reached_B, top)
                candidates.pass_over(leaders.beyond(slack))
            elif number == next_raise and rounding.inputs:
                known = _Known.of(candidates.best(top), exact)
                candidates.pass_over(known.beyond(slack))
                next_raise *= _RAISED_EVERY
            candidates.add(matmul.above(product_BC, candidates.threshold), start)
        return _Known.of(candidates.reaching(reached_B, top), exact)

    def _leaders(
        self,
        exact: ExactScores,
        product_BC: Any,
        reached_B: NDArray[np.float32],
        top: int,
    ) -> _Known:
        """Returns centers whose products reach these values, as at least `top` do. Their scores
        bound the answer more closely than their products.
        """
        hits = self.matmul.above(product_BC, np.nextafter(reached_B, np.float32(-np.inf)))
        num_rows = len(exact.z_BD)
        ids = first_of_each(hits.rows, hits.columns, num_rows, top)
        return _Known.of(np.full((num_rows, top), -1) if ids is None else ids, exact)

    def _rescored(
        self,
        exact: ExactScores,
        candidates: Candidates,
        known: _Known,
        slack: Slack,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Returns the first of the known and the candidates by float64 score, as many as are known.

        Only candidates that may be in the answer despite rounding are scored.
        """
        rounding = self.matmul.rounding
        rows, ids, products = candidates.above(known.beyond(slack))
        least_B = known.least() - DOUBLE_MARGIN
        if rounding.inputs:  # the bound of each center
            able = (
                products.astype(np.float64) + slack.of_pairs(rows, ids) + slack.offset[rows]
                >= least_B[rows]
            )
            rows, ids = rows[able], ids[able]
        able = (known.ids[rows] != ids[:, None]).all(axis=1)
        rows, ids = rows[able], ids[able]
        if rounding.inputs:  # float32 rules most of them out, for less
            scores = single_scores(exact.z_BD, self.centers, rows, ids)
            able = scores + slack.single()[rows] >= least_B[rows]
            rows, ids = rows[able], ids[able]
        return exact.first_of_all(known.ids, known.scores, rows, ids)
