import hashlib
import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlcd.errors
from mlcd.errors import InvalidInput, MlcdError
from mlcd.keys import mask_held_out, split_positions
from mlcd.randomness import hash_counters, permutation, uniform
from mlcd.types import cosines, min_dot_product, unit_rows


def test_the_tree_in_the_docstring_is_the_tree_in_the_code():
    classes = {name for name, value in vars(mlcd.errors).items() if inspect.isclass(value)}
    drawn = {word for word in mlcd.errors.__doc__.replace("│", " ").split() if word in classes}
    assert drawn == classes


def test_an_error_reads_as_one_line_with_its_remedy():
    assert str(MlcdError("the disk is full", remedy="free space")) == "the disk is full: free space"


@given(
    st.floats(-1.1, 1.1) | st.floats(1 - 1e-6, 1 + 1e-6),
    st.floats(-1, 1) | st.floats(1 - 1e-6, 1),
    st.none() | st.integers(-3, 3),
)
def test_a_product_reaches_a_threshold_where_its_cosine_does(product, threshold, ulps):
    if ulps is not None:  # a product that is rounded to the threshold, or beside it
        product = float(np.float32(threshold) + ulps * np.spacing(np.float32(threshold)) / 4)
    (similarity,) = cosines(np.array([product]))
    assert (similarity.dtype, -1 <= similarity <= 1) == (np.float32, True)
    assert abs(similarity - max(-1, min(1, product))) <= 2**-20
    assert (product >= min_dot_product(threshold)) == (similarity >= np.float32(threshold))
    assert product >= min_dot_product(float(similarity))


def test_no_neighbor_stays_none():
    given = np.array([[1.00000024, 0.5, -np.inf]], np.float32)
    assert cosines(given).tolist() == [[1.0, 0.5, -np.inf]]
    assert given[0, 0] > 1


@pytest.mark.parametrize("dimension", [2, 16, 100, 512, 2048])
def test_copies_have_a_cosine_of_one(dimension):
    rows = unit_rows(np.random.default_rng(dimension).standard_normal((300, dimension)))
    again = unit_rows(rows * np.float32(0.7))
    for others in (rows, again):
        for products in (rows @ others.T, rows.astype(np.float64) @ others.T.astype(np.float64)):
            similarities = cosines(products)
            assert (similarities.diagonal() == 1).all()
            assert similarities.max() == 1


def test_unit_rows_names_the_row_that_has_no_direction():
    with pytest.raises(InvalidInput, match="row 1"):
        unit_rows(np.array([[1.0, 0.0], [0.0, 0.0]]))
    with pytest.raises(InvalidInput, match="row 0"):
        unit_rows(np.array([[np.nan, 0.0]]))


def test_hashes_are_the_same_on_every_machine():
    # The first output of SplitMix64 for this seed, as published with its reference implementation.
    assert hash_counters(1234567).tolist() == [6457827717110365317]
    assert hash_counters(1, np.array([2])) != hash_counters(2, np.array([1]))


@given(st.integers(0, 2**31), st.integers(1, 300))
def test_permutation_holds_every_number_once(seed, num):
    assert sorted(permutation(num, seed)) == list(range(num))


def test_uniform_is_uniform_and_its_streams_are_independent():
    values = uniform(0, 1, np.arange(100_000))
    counts = np.bincount((values * 20).astype(int), minlength=20)
    assert (
        (counts - 5000) ** 2 / 5000
    ).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(values, uniform(0, 2, np.arange(100_000)))[0, 1]) < 0.01


def test_held_out_takes_its_share_of_every_class_whatever_the_order():
    keys = [f"{c}/{i}" for c in "ab" for i in range(50)]
    classes = [key[0] for key in keys]
    mask = mask_held_out(split_positions(keys, classes), 0.2)
    assert mask[:50].sum() == mask[50:].sum() == 10
    order = np.random.default_rng(0).permutation(100)
    again = mask_held_out(
        split_positions([keys[i] for i in order], [classes[i] for i in order]), 0.2
    )
    assert (again == mask[order]).all()


@given(
    st.lists(
        st.tuples(st.text(), st.none() | st.sampled_from("abc")), unique_by=lambda pair: pair[0]
    )
)
def test_a_key_stands_in_its_class_where_its_sha256_does(named):
    """Sorted one class after the other, as Python objects: the split of every artifact that was
    ever made.
    """
    keys, classes = [key for key, _ in named], [name for _, name in named]
    expected = np.zeros(len(keys))
    for name in set(classes):
        rows = [row for row, other in enumerate(classes) if other == name]
        by_hash = sorted(rows, key=lambda row: hashlib.sha256(keys[row].encode()).digest())
        expected[by_hash] = (np.arange(len(rows)) + 0.5) / len(rows)
    assert split_positions(keys, classes).tolist() == expected.tolist()


def test_held_out_without_classes_takes_its_share_overall():
    for num, share in ((100, 20), (7, 1), (3, 1), (2, 0), (1, 0)):
        assert (
            mask_held_out(split_positions([str(i) for i in range(num)], [None] * num), 0.2).sum()
            == share
        )
