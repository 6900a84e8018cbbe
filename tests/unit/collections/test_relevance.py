"""Less like this: queries move away from the mean of what is not wanted."""

import numpy as np
import pytest

from mlcd.collections.relevance import move_away
from mlcd.errors import InvalidInput


def test_queries_are_less_like_it_and_of_unit_length(vectors):
    queries, unwanted = vectors[:5], vectors[5:8]
    for weight in (0.1, 0.5, 1.0):
        moved = move_away(queries, unwanted, weight)
        expected = queries - weight * unwanted.mean(axis=0)
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        assert moved == pytest.approx(expected, abs=1e-6)
        mean = unwanted.mean(axis=0)
        assert (moved @ mean < queries @ mean).all()


def test_nothing_is_left_of_a_query_without_itself(vectors):
    with pytest.raises(InvalidInput, match="smaller weight"):
        move_away(vectors[:1], vectors[:1], 1.0)
