"""The scores of terms against counts by hand and against brute force in float64."""

import numpy as np
import pytest

from mlcd.naming.term_scores import Tally, best_scores, class_tf_idf, contrast
from mlcd.naming.terms import MemberTerms, tokens


@pytest.fixture
def by_hand():
    """Three captions of cats, then two of dogs."""
    captions = ["a cat", "cat cat mat", "a mat", "a dog", "dog"]
    terms = MemberTerms.of_lists([tokens(caption) for caption in captions])
    return terms, np.array([0, 0, 0, 1, 1])


def scored(terms, assignment, num_clusters, score):
    tally = Tally.of(terms, assignment, num_clusters)
    return {
        (cluster, terms.vocabulary[term]): value
        for cluster, term, value in zip(
            tally.clusters.tolist(), tally.terms.tolist(), score(tally).tolist(), strict=True
        )
    }


def test_class_tf_idf_is_what_a_hand_computes(by_hand):
    # entries: cats a 2, cat 2, mat 2; dogs a 1, dog 2. In all 9, a mean of 4.5 for a cluster.
    assert scored(*by_hand, 2, class_tf_idf) == pytest.approx(
        {
            (0, "a"): 2 / 3 * np.log(1 + 4.5 / 3),
            (0, "cat"): 2 / 3 * np.log(1 + 4.5 / 2),
            (0, "mat"): 2 / 3 * np.log(1 + 4.5 / 2),
            (1, "a"): 1 / 2 * np.log(1 + 4.5 / 3),
            (1, "dog"): 2 / 2 * np.log(1 + 4.5 / 2),
        }
    )


def test_contrast_is_what_a_hand_computes(by_hand):
    assert scored(*by_hand, 2, contrast) == pytest.approx(
        {
            (0, "a"): 2 / 3 - 1 / 2,
            (0, "cat"): 2 / 3,
            (0, "mat"): 2 / 3,
            (1, "a"): 1 / 2 - 2 / 3,
            (1, "dog"): 1.0,
        }
    )


def test_a_tally_of_ranked_terms_is_that_of_brute_force():
    rng = np.random.default_rng(3)
    best = np.argsort(rng.random((200, 12)), axis=1)[:, :5]
    best[rng.random(best.shape) < 0.2] = -1
    assignment = rng.integers(0, 7, 200) % 6  # cluster 6 has no member
    terms = MemberTerms.of_ranked([f"w{number}" for number in range(12)], best)
    tally = Tally.of(terms, assignment, 7)
    weights, having, leading = (np.zeros((7, 12)) for _ in range(3))
    for member, ranked in enumerate(best.tolist()):
        for rank, term in enumerate(ranked):
            if term >= 0:
                weights[assignment[member], term] += 1 / (rank + 1)
                having[assignment[member], term] += 1
                leading[assignment[member], term] += rank == 0
    clusters, found = np.nonzero(having)
    np.testing.assert_array_equal((tally.clusters, tally.terms), (clusters, found))
    np.testing.assert_allclose(tally.weights, weights[clusters, found], rtol=1e-12)
    np.testing.assert_array_equal(tally.having, having[clusters, found])
    np.testing.assert_array_equal(tally.leading, leading[clusters, found])
    np.testing.assert_array_equal(tally.sizes, np.bincount(assignment, minlength=7))
    np.testing.assert_allclose(tally.totals, weights.sum(axis=0), rtol=1e-12)
    scores = contrast(tally)
    highest = [max(scores[clusters == c], default=-np.inf) for c in range(7)]
    np.testing.assert_array_equal(best_scores(tally, scores), highest)


def test_members_without_terms_are_members():
    terms = MemberTerms.of_lists([["x"], [], []])
    tally = Tally.of(terms, np.zeros(3, np.int64), 2)
    assert tally.sizes.tolist() == [3, 0]
    assert contrast(tally).tolist() == pytest.approx([1 / 3])
    nothing = Tally.of(MemberTerms.of_lists([[], []]), np.array([0, 1]), 2)
    assert best_scores(nothing, contrast(nothing)).tolist() == [-np.inf, -np.inf]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A T-shirt, 100% cotton", ["a", "t-shirt", "cotton"]),
        ("Straße & ÉCOLE d\u2019été", ["strasse", "école", "d\u2019été"]),
        ("кошка_2 на стуле", ["кошка", "на", "стуле"]),
        ("2011", []),
    ],
)
def test_words_of_any_script_are_tokens(text, found):
    assert tokens(text) == found
