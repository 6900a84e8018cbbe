"""The terms of a cluster's members: the words nearest to an image, the tokens of its caption, or
the values of a field.

Shapes: N members, E entries (a term of a member).
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

# letters of any script, joined by hyphens and apostrophes
_TOKEN: Final = re.compile(r"[^\W\d_]+(?:[-'’][^\W\d_]+)*")  # noqa: RUF001 - the typographic one


@dataclass(frozen=True)
class MemberTerms:
    """The terms that each member has, each at most once.

    members, terms, ranks: int64 [E]. A rank of 0 is a member's best term; terms without an order
    all have it. Terms are numbers of the vocabulary.
    """

    vocabulary: tuple[str, ...]
    members: NDArray[np.int64]
    terms: NDArray[np.int64]
    ranks: NDArray[np.int64]
    num_members: int

    @classmethod
    def of_lists(cls, lists: Sequence[Collection[str]]) -> "MemberTerms":
        """Builds the terms of members that have them in no order; a repetition counts once."""
        distinct = [sorted(set(terms_of_member)) for terms_of_member in lists]
        vocabulary = tuple(
            sorted({term for terms_of_member in distinct for term in terms_of_member})
        )
        number = {term: index for index, term in enumerate(vocabulary)}
        terms = np.array(
            [number[term] for terms_of_member in distinct for term in terms_of_member],
            dtype=np.int64,
        )
        lengths = np.array([len(terms_of_member) for terms_of_member in distinct], dtype=np.int64)
        members = np.repeat(np.arange(len(distinct)), lengths)
        return cls(vocabulary, members, terms, np.zeros_like(terms), len(distinct))

    @classmethod
    def of_ranked(cls, vocabulary: Sequence[str], best: NDArray[np.integer]) -> "MemberTerms":
        """Builds the terms of members from the numbers of the best terms of each, [N, R], -1 where
        there are fewer.
        """
        members, ranks = np.nonzero(best >= 0)
        terms = best[members, ranks].astype(np.int64)
        return cls(tuple(vocabulary), members, terms, ranks, len(best))

    @cached_property
    def num_ranks(self) -> int:
        return int(self.ranks.max(initial=0)) + 1


def tokens(text: str) -> list[str]:
    """Returns the words of a caption, in small letters and in their order."""
    return _TOKEN.findall(text.casefold())
