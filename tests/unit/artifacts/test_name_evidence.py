"""The evidence for names: numbered files that nobody changes, checked with the centers."""

import numpy as np
import pytest

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.given_names import GivenNames, read_given_names, write_given_names
from mlcd.artifacts.manifest import open_artifact
from mlcd.artifacts.name_evidence import NameEvidence, read_evidence, write_evidence
from mlcd.errors import ArtifactInvalid
from mlcd.pipelines.verify import verify
from tests.written_artifacts import write_centers


@pytest.fixture
def centers(tmp_path):
    return write_centers(tmp_path / "centers", np.random.default_rng(0).standard_normal((3, 8)))


def evidence(*names):
    return NameEvidence({"method": "words"}, [{"name": name} for name in names])


def test_each_naming_adds_a_file_and_the_same_one_none(centers):
    one, two = evidence("cat", None, "狗"), evidence("cat", "dog", None)
    assert [write_evidence(centers, each) for each in (one, one, two, two, one)] == [
        "0001.json",
        "0001.json",
        "0002.json",
        "0002.json",
        "0003.json",
    ]
    assert read_evidence(centers, "0001.json") == one
    first, third = ((centers.path / "names" / f"000{number}.json") for number in (1, 3))
    assert first.read_bytes() == third.read_bytes()


def test_names_by_hand_stay_until_they_are_taken_away(centers):
    given = GivenNames((None, None, None), frozenset()).set_by_hand({1: "wolf"})
    named = given.set_from("0001.json", ("cat", "dog", None))
    assert (named.names, named.by_hand) == (("cat", "wolf", None), {1})
    assert (named.evidence, named.version) == ("0001.json", 2)
    freed = named.set_by_hand({1: None})
    assert freed.names == ("cat", None, None)
    assert freed.set_from("0002.json", ("cat", "dog", None)).names == ("cat", "dog", None)
    write_given_names(centers, named)
    assert read_given_names(centers, 3) == named
    assert Centers.open(centers.path).names == ("cat", "wolf", None)


def test_evidence_that_is_damaged_or_missing_or_of_other_centers_is_told(centers, tmp_path):
    write_evidence(centers, evidence("cat", None, None))
    write_given_names(centers, GivenNames(("cat", None, None), frozenset(), "0001.json"))
    assert all(finding.checked for finding in verify(centers.path))
    file = centers.path / "names" / "0001.json"
    whole = file.read_text()
    file.write_text(whole.replace("cat", "dog"))
    with pytest.raises(ArtifactInvalid, match=r"0001\.json is damaged or was edited"):
        list(verify(centers.path))
    file.unlink()
    with pytest.raises(ArtifactInvalid, match=r"0001\.json is missing"):
        list(verify(centers.path))
    write_centers(tmp_path / "others", np.eye(3, 8), config={"a": 1})
    (tmp_path / "others" / "names").mkdir()
    (tmp_path / "others" / "names" / "0001.json").write_text(whole)
    with pytest.raises(ArtifactInvalid, match="belongs to other centers"):
        read_evidence(open_artifact(tmp_path / "others"), "0001.json")
