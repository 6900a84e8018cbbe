"""Scores terms as names of clusters: high if members of the cluster have the term and members of
other clusters do not.

The r-th best term of a member has weight 1/r. Shapes: K clusters, W terms of the vocabulary, P
pairs of a cluster and a term of its members.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlcd.naming.terms import MemberTerms

_Number = TypeVar("_Number", np.int64, np.float64)


@dataclass(frozen=True)
class Tally:
    """Counts of the pairs (cluster, term) that occur, sorted by cluster, then by term.

    clusters, terms: int64 [P]. weights: float64 [P], sum of 1/r over the members. having: int64
    [P], number of members with the term. leading: int64 [P], number of members whose best term it
    is. sizes: int64 [K], number of members. totals, owners: [W], weights and having summed over all
    clusters.
    """

    clusters: NDArray[np.int64]
    terms: NDArray[np.int64]
    weights: NDArray[np.float64]
    having: NDArray[np.int64]
    leading: NDArray[np.int64]
    sizes: NDArray[np.int64]
    totals: NDArray[np.float64]
    owners: NDArray[np.int64]

    @classmethod
    def of(cls, terms: MemberTerms, assignment: NDArray[np.integer], num_clusters: int) -> "Tally":
        """Counts the terms of each cluster. assignment: cluster of each member, [N]."""
        num_terms, num_ranks = len(terms.vocabulary), terms.num_ranks
        pairs = assignment[terms.members].astype(np.int64) * num_terms + terms.terms
        # A single sort of integers is fast; this runs for every shuffle.
        entries = np.sort(pairs * num_ranks + terms.ranks)
        pairs, ranks = np.divmod(entries, num_ranks)
        starts = np.flatnonzero(np.diff(pairs, prepend=-1))
        clusters, pair_terms = np.divmod(pairs[starts], max(1, num_terms))
        weight_of_rank = 1 / np.arange(1, num_ranks + 1)
        totals: NDArray[np.float64] = np.bincount(
            terms.terms, weights=weight_of_rank[terms.ranks], minlength=num_terms
        ).astype(np.float64)
        return cls(
            clusters=clusters,
            terms=pair_terms,
            weights=_sums(weight_of_rank[ranks], starts, np.float64),
            having=np.diff(starts, append=len(pairs)),
            leading=_sums(ranks == 0, starts, np.int64),
            sizes=np.bincount(assignment, minlength=num_clusters),
            totals=totals,
            owners=np.bincount(terms.terms, minlength=num_terms),
        )

    @property
    def bounds(self) -> NDArray[np.int64]:
        """Returns the index of each cluster's first pair, [K + 1]."""
        return np.searchsorted(self.clusters, np.arange(len(self.sizes) + 1))


# score(tally) returns float64 [P]; higher is better
Score: TypeAlias = Callable[[Tally], NDArray[np.float64]]


def contrast(tally: Tally) -> NDArray[np.float64]:
    """Returns the term's mean weight over the members, less its mean weight over all members of
    other clusters.
    """
    sizes = tally.sizes[tally.clusters]
    num_outside = tally.sizes.sum() - sizes
    elsewhere = (tally.totals[tally.terms] - tally.weights) / np.maximum(num_outside, 1)
    scores: NDArray[np.float64] = tally.weights / sizes - elsewhere
    return scores


def class_tf_idf(tally: Tally) -> NDArray[np.float64]:
    """Returns the term's mean weight over the members, times log(1 + A / f).

    f is the total weight of the term in all clusters; A is the total weight of all terms divided by
    the number of non-empty clusters (Grootendorst 2022: BERTopic, section 3.3).
    """
    mean = tally.totals.sum() / max(1, int((tally.sizes > 0).sum()))
    rarity = np.log1p(mean / tally.totals[tally.terms])
    scores: NDArray[np.float64] = tally.weights / tally.sizes[tally.clusters] * rarity
    return scores


def best_scores(tally: Tally, scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the highest score of each cluster, [K]; -inf for a cluster without terms."""
    best = np.full(len(tally.sizes), -np.inf)
    starts = np.flatnonzero(np.diff(tally.clusters, prepend=-1))
    if len(starts):
        best[tally.clusters[starts]] = np.maximum.reduceat(scores, starts)
    return best


def _sums(
    values: NDArray[Any], starts: NDArray[np.int64], dtype: type[_Number]
) -> NDArray[_Number]:
    """Returns the sum of the values from each start up to the next start."""
    if not len(starts):
        return np.zeros(0, dtype)
    sums: NDArray[_Number] = np.add.reduceat(values, starts, dtype=dtype)
    return sums
