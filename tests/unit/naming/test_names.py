"""Names: right where the members agree, none where the members are random, the same each time."""

import numpy as np
import pytest

from mlcd.naming.chosen_names import name_clusters
from mlcd.naming.speaking_members import draw_members, nearest_words
from mlcd.naming.term_scores import class_tf_idf, contrast
from mlcd.naming.terms import MemberTerms
from mlcd.types import unit_rows


@pytest.fixture(scope="module")
def planted():
    """600 members of 30 clusters around 30 of 200 words, in two cones as towers have them."""
    rng = np.random.default_rng(0)
    concepts = rng.standard_normal((200, 48))
    words = unit_rows(concepts + 8 * rng.standard_normal(48))
    assignment = np.repeat(np.arange(30), 20)
    members = unit_rows(
        concepts[assignment] + rng.standard_normal((600, 48)) + 8 * rng.standard_normal(48)
    )
    return words, members, assignment


def named(words, members, assignment, **options):
    best = nearest_words(members, words)
    terms = MemberTerms.of_ranked([f"w{number}" for number in range(len(words))], best)
    nearest = np.roll(np.arange(assignment.max() + 1), 1)
    return name_clusters(terms, assignment, nearest, contrast, **options)


def test_planted_clusters_get_their_words_and_shuffled_ones_none(planted):
    words, members, assignment = planted
    found = named(words, members, assignment)
    assert [each.name for each in found] == [f"w{number}" for number in range(30)]
    assert all(each.margin > 0 and len(each.alternates) == 2 for each in found)
    assert all(each.unlike is not None and each.unlike.share > each.unlike.there for each in found)
    # 20 % of the clusters change members among themselves
    mixed = assignment.copy()
    among = np.flatnonzero(assignment < 6)
    mixed[among] = np.random.default_rng(1).permutation(assignment[among])
    found = named(words, members, mixed)
    assert sum(each.name is None for each in found[:6]) >= 5
    assert [each.name for each in found[6:]] == [f"w{number}" for number in range(6, 30)]


def test_random_members_pass_the_test_of_chance_once_in_a_hundred_times(planted):
    words, members, assignment = planted
    rng = np.random.default_rng(2)
    passed = [
        each.score > each.by_chance
        for _ in range(10)
        for each in named(words, members, rng.permutation(assignment), least_share=0.0)
    ]
    assert sum(passed) <= 10  # of 300; 3 are expected


def test_the_nearest_words_are_those_of_brute_force(planted):
    words, members, _ = planted
    rows, columns = (
        each.astype(np.float64) - each.astype(np.float64).mean(axis=0) for each in (members, words)
    )
    scores = rows @ (columns / np.linalg.norm(columns, axis=1, keepdims=True)).T
    expected = np.argsort(-scores, axis=1)[:, :5]
    found = nearest_words(members, words)
    same = (found == expected).all(axis=1)
    gaps = np.diff(np.sort(scores / np.linalg.norm(rows, axis=1, keepdims=True), axis=1)[:, -6:])
    assert (same | (gaps.min(axis=1) < 1e-6)).all()
    assert nearest_words(members[:3], words[:2]).tolist() == [
        [*row, -1, -1, -1] for row in nearest_words(members[:3], words[:2], 2).tolist()
    ]


def test_no_member_and_no_term_is_no_name():
    terms = MemberTerms.of_lists([["x"]] * 8 + [["y"]] * 8 + [[]] * 8)
    assignment = np.repeat([0, 1, 3], 8)
    first, second, empty, without = name_clusters(
        terms, assignment, np.array([1, 0, 0, -1]), class_tf_idf
    )
    assert (first.name, second.name, empty.name, without.name) == ("x", "y", None, None)
    assert (first.alternates, first.terms[0].share, first.terms[0].elsewhere) == ((), 1.0, 0.0)
    assert (first.unlike.center, first.unlike.term, first.unlike.there) == (1, "x", 0.0)
    assert first.typical == (0, 1, 2)
    assert (empty.members, empty.unlike, without.unlike) == (0, None, None)


def test_a_term_that_fits_few_members_is_no_name():
    lists = [["x"]] * 4 + [[]] * 6 + [["y"]] * 40
    terms, assignment = MemberTerms.of_lists(lists), np.repeat([0, 1], [10, 40])
    few = name_clusters(terms, assignment, np.array([1, 0]), contrast)[0]
    assert few.name is None
    assert few.score > few.by_chance
    asked = name_clusters(terms, assignment, np.array([1, 0]), contrast, least_share=0.4)[0]
    assert asked.name == "x"


def test_as_many_members_as_needed_are_asked():
    assignment = np.repeat(np.arange(2000), 20)
    asked = draw_members(assignment, 2000)
    assert np.bincount(assignment[asked]).tolist() == [8] * 2000
    assert (np.diff(asked) > 0).all()
    few = np.array([1, 0, 1, 1])
    assert draw_members(few, 3).tolist() == [0, 1, 2, 3]
