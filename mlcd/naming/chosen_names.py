"""Chooses the name of each cluster, with its evidence; no name if the evidence is weak.

A name must pass two tests. Its score must exceed the cluster's best score in each of 99 random
shuffles of the members among the clusters, so a cluster of random members gets a name in one case
of a hundred. And at least `least_share` of the members must have the term.

Shapes: N members, K clusters, P pairs of a cluster and a term.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.naming.term_scores import Score, Tally, best_scores
from mlcd.naming.terms import MemberTerms
from mlcd.randomness import permutation

SHUFFLES: Final = 99
LEAST_SHARE: Final = 0.5
_SHOWN_TERMS: Final = 5
_NUM_ALTERNATES: Final = 2
_NUM_TYPICAL: Final = 3
_DIGITS: Final = 6  # decimals; beyond them, the order of summation changes the numbers


@dataclass(frozen=True)
class TermEvidence:
    """A term of a cluster, with three shares in [0, 1].

    share: members that have the term. leading: members whose best term it is. elsewhere: members of
    all other clusters that have the term.
    """

    term: str
    score: float
    share: float
    leading: float
    elsewhere: float


@dataclass(frozen=True)
class Unlike:
    """The term that most distinguishes a cluster from its nearest cluster `center`.

    share, there: share of the members that have the term, in this cluster and in the nearest one.
    """

    center: int
    term: str
    share: float
    there: float


@dataclass(frozen=True)
class ClusterName:
    """The name of a cluster; None if the evidence is weak.

    alternates: the terms with the next best scores. margin: the best score less the second best.
    by_chance: the highest score of any term in the shuffles. members: number of members whose terms
    were counted. typical: indices of the members that best match the cluster's terms.
    """

    name: str | None
    alternates: tuple[str, ...]
    margin: float
    score: float
    by_chance: float
    members: int
    terms: tuple[TermEvidence, ...]
    unlike: Unlike | None
    typical: tuple[int, ...]


def name_clusters(
    terms: MemberTerms,
    assignment: NDArray[np.integer],
    nearest: NDArray[np.integer],
    score: Score,
    *,
    least_share: float = LEAST_SHARE,
) -> list[ClusterName]:
    """Returns the name of each cluster.

    assignment: cluster of each member, [N]. nearest: nearest other cluster, [K], or -1.
    least_share: least share of the members that must have the term.
    """
    num_clusters = len(nearest)
    tally = Tally.of(terms, assignment, num_clusters)
    scores = np.round(score(tally), _DIGITS)
    by_chance = _best_shuffled_scores(terms, assignment, num_clusters, score)
    typical = _typical_members(terms, assignment, tally, scores)
    bounds = tally.bounds
    names = []
    for cluster in range(num_clusters):
        pairs = np.arange(bounds[cluster], bounds[cluster + 1])
        best_pairs = pairs[np.argsort(-scores[pairs], kind="stable")]
        names.append(
            _choose_name(
                cluster,
                best_pairs,
                terms.vocabulary,
                tally,
                scores,
                by_chance=float(by_chance[cluster]),
                unlike=_find_contrast(
                    cluster, int(nearest[cluster]), bounds, tally, terms.vocabulary
                ),
                typical=typical.get(cluster, ()),
                least_share=least_share,
            )
        )
    return names


def _choose_name(
    cluster: int,
    best_pairs: NDArray[np.int64],
    vocabulary: tuple[str, ...],
    tally: Tally,
    scores: NDArray[np.float64],
    *,
    by_chance: float,
    unlike: Unlike | None,
    typical: tuple[int, ...],
    least_share: float,
) -> ClusterName:
    size = int(tally.sizes[cluster])
    shown = tuple(
        _describe_term(pair, size, vocabulary, tally, scores)
        for pair in best_pairs[:_SHOWN_TERMS].tolist()
    )
    best = shown[0].score if shown else 0.0
    second = shown[1].score if len(shown) > 1 else 0.0
    passes = bool(shown) and best > by_chance and shown[0].share >= least_share
    return ClusterName(
        name=shown[0].term if passes else None,
        alternates=tuple(evidence.term for evidence in shown[1 : 1 + _NUM_ALTERNATES]),
        margin=round(best - second, _DIGITS),
        score=best,
        by_chance=by_chance,
        members=size,
        terms=shown,
        unlike=unlike,
        typical=typical,
    )


def _describe_term(
    pair: int,
    size: int,
    vocabulary: tuple[str, ...],
    tally: Tally,
    scores: NDArray[np.float64],
) -> TermEvidence:
    term, num_having = int(tally.terms[pair]), int(tally.having[pair])
    num_outside = int(tally.sizes.sum()) - size
    elsewhere = (int(tally.owners[term]) - num_having) / max(1, num_outside)
    return TermEvidence(
        term=vocabulary[term],
        score=float(scores[pair]),
        share=round(num_having / size, _DIGITS),
        leading=round(int(tally.leading[pair]) / size, _DIGITS),
        elsewhere=round(elsewhere, _DIGITS),
    )


def _best_shuffled_scores(
    terms: MemberTerms, assignment: NDArray[np.integer], num_clusters: int, score: Score
) -> NDArray[np.float64]:
    """Returns the highest score of each cluster over all shuffles, [K], at least 0."""
    highest = np.zeros(num_clusters)
    for shuffle in range(SHUFFLES):
        shuffled = assignment[permutation(len(assignment), shuffle)]
        tally = Tally.of(terms, shuffled, num_clusters)
        np.maximum(highest, best_scores(tally, score(tally)), out=highest)
    return np.round(highest, _DIGITS)


def _find_contrast(
    cluster: int,
    nearest: int,
    bounds: NDArray[np.int64],
    tally: Tally,
    vocabulary: tuple[str, ...],
) -> Unlike | None:
    if nearest < 0:
        return None
    own_pairs = slice(bounds[cluster], bounds[cluster + 1])
    nearest_pairs = slice(bounds[nearest], bounds[nearest + 1])
    own_shares = tally.having[own_pairs] / max(1, int(tally.sizes[cluster]))
    nearest_shares = np.zeros(len(own_shares))
    _, own_index, nearest_index = np.intersect1d(
        tally.terms[own_pairs], tally.terms[nearest_pairs], assume_unique=True, return_indices=True
    )
    num_nearest = max(1, int(tally.sizes[nearest]))
    nearest_shares[own_index] = tally.having[nearest_pairs][nearest_index] / num_nearest
    differences = np.round(own_shares - nearest_shares, _DIGITS)
    if not len(differences) or differences.max() <= 0:
        return None
    best = int(differences.argmax())
    return Unlike(
        center=nearest,
        term=vocabulary[int(tally.terms[own_pairs][best])],
        share=round(float(own_shares[best]), _DIGITS),
        there=round(float(nearest_shares[best]), _DIGITS),
    )


def _typical_members(
    terms: MemberTerms,
    assignment: NDArray[np.integer],
    tally: Tally,
    scores: NDArray[np.float64],
) -> dict[int, tuple[int, ...]]:
    """Returns the members of each cluster whose terms score highest in the cluster, best first.

    A member's value is the sum of its terms' scores divided by the root of their number, so that
    neither one rare word nor a long text wins.
    """
    num_terms = len(terms.vocabulary)
    entry_keys = assignment[terms.members].astype(np.int64) * num_terms + terms.terms
    entry_pairs = np.searchsorted(tally.clusters * num_terms + tally.terms, entry_keys)
    num = terms.num_members
    sums = np.bincount(terms.members, weights=scores[entry_pairs], minlength=num)
    lengths = np.bincount(terms.members, minlength=num)
    values = np.round(sums / np.sqrt(np.maximum(lengths, 1)), _DIGITS)
    members = np.flatnonzero(lengths)
    members = members[np.lexsort((members, -values[members], assignment[members]))]
    clusters = assignment[members]
    is_typical = np.arange(len(clusters)) - np.searchsorted(clusters, clusters) < _NUM_TYPICAL
    typical: dict[int, tuple[int, ...]] = {}
    for cluster, member in zip(
        clusters[is_typical].tolist(), members[is_typical].tolist(), strict=True
    ):
        typical[cluster] = (*typical.get(cluster, ()), member)
    return typical
