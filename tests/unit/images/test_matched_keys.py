"""Keys of tables beside images match exactly, else in one normal form, and the rest is counted."""

import unicodedata

import pytest

from mlcd.errors import InvalidInput
from mlcd.images.matched_keys import match_keys

NFC, NFD = (unicodedata.normalize(form, "Café/ñ.png") for form in ("NFC", "NFD"))


@pytest.mark.parametrize(
    ("stated", "key"),
    [
        ("./a.png", "a.png"),
        ("b//c.png", "b/c.png"),
        ("b/./x/../c.png", "b/c.png"),
        (NFD, NFC),
        (NFC, NFD),
        ("./" + NFD, NFC),
        ("\udcff.png", "\\xff.png"),  # as JSON states a name that is not valid UTF-8
    ],
)
def test_a_key_is_found_in_another_spelling(stated, key):
    matched = match_keys([stated, "zz"], ["other", key], "t.csv")
    assert matched.indices.tolist() == [1, -1]
    assert (matched.unmatched.num, matched.unmatched.first) == (1, "zz")


@pytest.mark.parametrize(
    "stated", ["A.png", "/a.png", "../a.png", "a.png ", "d\\a.png", "stra\u00dfe", "\ud800"]
)
def test_other_names_are_other_keys(stated):
    assert match_keys([stated], ["a.png", "d/a.png", "strasse"], "t").unmatched.num == 1


def test_the_exact_key_is_preferred_and_a_key_of_two_images_is_refused():
    assert match_keys([NFD, NFC], [NFC, NFD], "t").indices.tolist() == [1, 0]
    with pytest.raises(InvalidInput, match=r"t\.csv: '\./Cafe\\u0301.* may be 'Caf\\xe9"):
        match_keys(["./" + NFD], ["a", NFC, NFD], "t.csv")
    assert match_keys(["./a"], ["a", NFC, NFD], "t").indices.tolist() == [0]


def test_each_unmatched_key_counts_once_and_none_at_all_is_always_refused():
    unmatched = match_keys(["a", "x", "x", "y"], ["a"], "t").unmatched
    with pytest.raises(InvalidInput, match=r"t: no image of P has the key 'x' \(2 of 3 keys\)"):
        unmatched.check("t", "P")
    unmatched.check("t", "P", may_be_unmatched=True)
    with pytest.raises(InvalidInput, match=r"contains \\, but keys are written with /"):
        match_keys(["d\\a"], ["d/a"], "t").unmatched.check("t", "P", may_be_unmatched=True)
    match_keys([], ["a"], "t").unmatched.check("t", "P")
    assert match_keys(["a"], [], "t").unmatched.are_all
