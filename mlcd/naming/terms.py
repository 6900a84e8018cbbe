"""The terms of a cluster's members: the words nearest to an image, the tokens of its caption, or
the values of a metadata field.

Shapes: N members, E entries, one for each term of each member.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

# letters of any script, joined by hyphens and apostrophes
_TOKEN: Final = re.compile(r"[^\W\d_]+(?:[-'’][^\W\d_]+)*")  # noqa: RUF001 - typographic apostrophe


@dataclass(frozen=True)
class MemberTerms:
    """The distinct terms of each member.

    members: index of the member, int64 [E]. terms: index into the vocabulary, int64 [E]. ranks:
    int64 [E], 0 for a member's best term; all 0 for unordered terms.
    """

    vocabulary: tuple[str, ...]
    members: NDArray[np.int64]
    terms: NDArray[np.int64]
    ranks: NDArray[np.int64]
    num_members: int

    @classmethod
    def of_lists(cls, lists: Sequence[Collection[str]]) -> "MemberTerms":
        """Builds unordered terms. lists: terms of each member; a repeated term counts once."""
        distinct = [sorted(set(member_terms)) for member_terms in lists]
        vocabulary = tuple(sorted({term for member_terms in distinct for term in member_terms}))
        index_of = {term: index for index, term in enumerate(vocabulary)}
        terms = np.array(
            [index_of[term] for member_terms in distinct for term in member_terms], dtype=np.int64
        )
        lengths = np.array([len(member_terms) for member_terms in distinct], dtype=np.int64)
        members = np.repeat(np.arange(len(distinct)), lengths)
        return cls(vocabulary, members, terms, np.zeros_like(terms), len(distinct))

    @classmethod
    def of_ranked(cls, vocabulary: Sequence[str], best: NDArray[np.integer]) -> "MemberTerms":
        """Builds ranked terms. best: vocabulary indices of each member's terms, best first, [N, R],
        padded with -1.
        """
        members, ranks = np.nonzero(best >= 0)
        terms = best[members, ranks].astype(np.int64)
        return cls(tuple(vocabulary), members, terms, ranks, len(best))

    @cached_property
    def num_ranks(self) -> int:
        return int(self.ranks.max(initial=0)) + 1


def tokens(text: str) -> list[str]:
    """Returns the words of a caption in order, case-folded."""
    return _TOKEN.findall(text.casefold())
