"""The names of clusters, each with its evidence, or none where that is weak.

A name has to pass two tests. More than chance: its score exceeds the best score that the cluster
gets in each of 99 shuffles of the members among the clusters, so a cluster of random members is
named once in a hundred times. More than a part: it fits a given share of the members.

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
_ALTERNATES: Final = 2
_TYPICAL: Final = 3
_DIGITS: Final = 6  # of shown numbers; sums of the same shares differ beyond them


@dataclass(frozen=True)
class TermEvidence:
    """A term of a cluster. share: of the members that have it; leading: of those whose best it is;
    elsewhere: of the members of all other clusters that have it.
    """

    term: str
    score: float
    share: float
    leading: float
    elsewhere: float


@dataclass(frozen=True)
class Unlike:
    """The term that most sets a cluster apart from its nearest one. share, there: the shares of the
    members of both that have it.
    """

    center: int
    term: str
    share: float
    there: float


@dataclass(frozen=True)
class ClusterName:
    """The name of a cluster, or None where the evidence is weak.

    alternates: the next terms. margin: the score of the best term less that of the next. by_chance:
    the highest score of any term in the shuffles. members: those that were asked. typical: the
    numbers of members that have most of the cluster's terms.
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

    assignment: [N], the cluster of each member. nearest: [K], the nearest other cluster, -1 where
    there is none. least_share: of the members that a name has to fit.
    """
    num_clusters = len(nearest)
    tally = Tally.of(terms, assignment, num_clusters)
    scores = np.round(score(tally), _DIGITS)
    by_chance = _best_by_chance(terms, assignment, num_clusters, score)
    typical = _typical_members(terms, assignment, tally, scores)
    bounds = tally.bounds
    names = []
    for cluster in range(num_clusters):
        part = np.arange(bounds[cluster], bounds[cluster + 1])
        order = part[np.argsort(-scores[part], kind="stable")]
        names.append(
            _choose_name(
                cluster,
                order,
                terms.vocabulary,
                tally,
                scores,
                by_chance=float(by_chance[cluster]),
                unlike=_unlike(cluster, int(nearest[cluster]), bounds, tally, terms.vocabulary),
                typical=typical.get(cluster, ()),
                least_share=least_share,
            )
        )
    return names


def _choose_name(
    cluster: int,
    order: NDArray[np.int64],
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
        _evidence(pair, size, vocabulary, tally, scores) for pair in order[:_SHOWN_TERMS].tolist()
    )
    best = shown[0].score if shown else 0.0
    second = shown[1].score if len(shown) > 1 else 0.0
    fits = bool(shown) and best > by_chance and shown[0].share >= least_share
    return ClusterName(
        name=shown[0].term if fits else None,
        alternates=tuple(evidence.term for evidence in shown[1 : 1 + _ALTERNATES]),
        margin=round(best - second, _DIGITS),
        score=best,
        by_chance=by_chance,
        members=size,
        terms=shown,
        unlike=unlike,
        typical=typical,
    )


def _evidence(
    pair: int,
    size: int,
    vocabulary: tuple[str, ...],
    tally: Tally,
    scores: NDArray[np.float64],
) -> TermEvidence:
    term, having = int(tally.terms[pair]), int(tally.having[pair])
    num_outside = int(tally.sizes.sum()) - size
    elsewhere = (int(tally.owners[term]) - having) / max(1, num_outside)
    return TermEvidence(
        term=vocabulary[term],
        score=float(scores[pair]),
        share=round(having / size, _DIGITS),
        leading=round(int(tally.leading[pair]) / size, _DIGITS),
        elsewhere=round(elsewhere, _DIGITS),
    )


def _best_by_chance(
    terms: MemberTerms, assignment: NDArray[np.integer], num_clusters: int, score: Score
) -> NDArray[np.float64]:
    """Returns the highest score of each cluster over all shuffles, [K]; 0 at least."""
    highest = np.zeros(num_clusters)
    for shuffle in range(SHUFFLES):
        shuffled = assignment[permutation(len(assignment), shuffle)]
        tally = Tally.of(terms, shuffled, num_clusters)
        np.maximum(highest, best_scores(tally, score(tally)), out=highest)
    return np.round(highest, _DIGITS)


def _unlike(
    cluster: int,
    nearest: int,
    bounds: NDArray[np.int64],
    tally: Tally,
    vocabulary: tuple[str, ...],
) -> Unlike | None:
    if nearest < 0:
        return None
    own_part = slice(bounds[cluster], bounds[cluster + 1])
    other_part = slice(bounds[nearest], bounds[nearest + 1])
    shares = tally.having[own_part] / max(1, int(tally.sizes[cluster]))
    theirs = np.zeros(len(shares))
    _, ours, theirs_at = np.intersect1d(
        tally.terms[own_part], tally.terms[other_part], assume_unique=True, return_indices=True
    )
    theirs[ours] = tally.having[other_part][theirs_at] / max(1, int(tally.sizes[nearest]))
    more = np.round(shares - theirs, _DIGITS)
    if not len(more) or more.max() <= 0:
        return None
    best = int(more.argmax())
    return Unlike(
        center=nearest,
        term=vocabulary[int(tally.terms[own_part][best])],
        share=round(float(shares[best]), _DIGITS),
        there=round(float(theirs[best]), _DIGITS),
    )


def _typical_members(
    terms: MemberTerms,
    assignment: NDArray[np.integer],
    tally: Tally,
    scores: NDArray[np.float64],
) -> dict[int, tuple[int, ...]]:
    """Returns the members of each cluster whose terms have the highest mean score in it.

    The sum is divided by the root of their number, so that neither one rare word nor a long text
    wins.
    """
    num_terms = len(terms.vocabulary)
    pairs = assignment[terms.members].astype(np.int64) * num_terms + terms.terms
    places = np.searchsorted(tally.clusters * num_terms + tally.terms, pairs)
    num = terms.num_members
    sums = np.bincount(terms.members, weights=scores[places], minlength=num)
    lengths = np.bincount(terms.members, minlength=num)
    value = np.round(sums / np.sqrt(np.maximum(lengths, 1)), _DIGITS)
    numbers = np.flatnonzero(lengths)
    order = numbers[np.lexsort((numbers, -value[numbers], assignment[numbers]))]
    of = assignment[order]
    first = np.arange(len(of)) - np.searchsorted(of, of) < _TYPICAL
    typical: dict[int, tuple[int, ...]] = {}
    for cluster, member in zip(of[first].tolist(), order[first].tolist(), strict=True):
        typical[cluster] = (*typical.get(cluster, ()), member)
    return typical
