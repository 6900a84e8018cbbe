"""Names that people give to centers: beside the artifact, checked on their own, and no part of its
digest.
"""

import json
import shutil

import numpy as np
import pytest

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.given_names import (
    GIVEN_NAMES,
    Renaming,
    change_names,
    current_names,
    read_names_file,
)
from mlcd.artifacts.manifest import open_artifact
from mlcd.errors import ArtifactInvalid, Conflict, InvalidInput, NotFound
from mlcd.pipelines.name import set_names
from mlcd.pipelines.verify import verify
from mlcd.service.inference.lookup import Lookup
from tests.written_artifacts import write_centers


@pytest.fixture
def centers(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((4, 8))
    write_centers(tmp_path / "centers", vectors, names=("cat", None, "dog", None))
    return tmp_path / "centers"


@pytest.mark.parametrize(
    "content",
    [
        '{"1": "Zwölf Stühle", "3": "椅子, 二", "0": null}',
        "1\tZwölf Stühle\n3\t椅子, 二\n0\t\n",
        'id,name\n1,Zwölf Stühle\n3,"椅子, 二"\n0,\n',
        "\ufeff1\t Zwölf Stühle \r\n\r\n3\t椅子, 二\r\n0\t\r\n",
    ],
    ids=["json", "tabs", "csv", "as a spreadsheet saves it"],
)
def test_names_are_set_and_the_digest_stays(centers, content, tmp_path):
    digest, file = open_artifact(centers).digest, tmp_path / "names"
    file.write_bytes(content.encode())
    naming = set_names(centers, file)
    named = Centers.open(centers)
    assert named.names == (None, "Zwölf Stühle", "dog", "椅子, 二")
    assert named.digest == naming.digest == digest
    assert (naming.num_changed, naming.num_named, naming.num_centers) == (3, 3, 4)
    assert all(finding.checked for finding in verify(centers))
    file.write_text('{"2": "wolf"}')
    assert set_names(centers, file).num_changed == 1
    assert Centers.open(centers).names == (None, "Zwölf Stühle", "wolf", "椅子, 二")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"4": "x"}', "must be those of centers, got '4': use ids from 0 to 3"),
        ("-1\tx\n", "must be those of centers, got '-1'"),
        ("cat\t1\n", "must be those of centers, got 'cat'"),
        ("²\tx\n", "must be those of centers, got '²'"),
        ("1\ta\n1\tb\n", "names center 1 twice"),
        ('{"1": "a", "01": "b"}', "names center 1 twice"),
        ('{"1": 3}', "the name of center 1 cannot be used"),
        ('{"1": {"a": "b"}}', "the name of center 1 cannot be used"),
        ('{"1": "a\\u0007"}', "the name of center 1 cannot be used"),
        (f"1\t{'x' * 201}\n", "the name of center 1 cannot be used"),
        ("1\ta\nx\n", "line 2 of .* must have an id and a name"),
        ('1\t"an open quote\n', "must be a table"),
        ("", "must name at least one center"),
        ("{}", "must name at least one center"),
        ('{"1": ', "must be valid JSON"),
    ],
)
def test_a_file_that_names_no_centers_is_refused_and_nothing_changes(
    centers, content, message, tmp_path
):
    file = tmp_path / "names"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(InvalidInput, match=message):
        set_names(centers, file)
    assert not (centers / GIVEN_NAMES).exists()


def test_each_change_is_a_version_and_those_by_people_are_remembered(centers):
    artifact = open_artifact(centers)
    change_names(artifact, lambda given: given.set_by_hand({0: "tiger", 1: "cat"}))
    change_names(artifact, lambda given: given.set_by_hand({0: "tiger"}))  # no change
    _, given = change_names(artifact, lambda given: given.set_by_hand({0: None, 1: "lynx"}))
    assert (given.version, given.names) == (2, (None, "lynx", "dog", None))
    assert given == current_names(artifact)
    assert given.history == (
        Renaming(1, 0, "cat", "tiger"),
        Renaming(1, 1, None, "cat"),
        Renaming(2, 0, "tiger", None),
        Renaming(2, 1, "cat", "lynx"),
    )


def test_names_are_not_written_beside_other_centers(centers):
    artifact = open_artifact(centers)
    shutil.rmtree(centers)
    write_centers(centers, np.eye(4, 8), config={"seed": 1})
    with pytest.raises(Conflict, match="taken the place"):
        change_names(artifact, lambda given: given.set_by_hand({0: "x"}))
    assert Centers.open(centers).names is None


def test_a_file_in_another_encoding_or_none_is_told(centers, tmp_path):
    (tmp_path / "latin").write_bytes("1\tStühle\n".encode("latin-1"))
    with pytest.raises(InvalidInput, match="not text in UTF-8"):
        read_names_file(tmp_path / "latin", 4)
    for absent in (tmp_path / "absent", tmp_path):
        with pytest.raises(NotFound, match="cannot be read"):
            read_names_file(absent, 4)


def test_names_that_were_edited_by_hand_or_are_of_other_centers_are_refused(centers, tmp_path):
    file, given = tmp_path / "names", centers / GIVEN_NAMES
    file.write_text('{"1": "bird"}')
    set_names(centers, file)
    whole = given.read_text()
    for damaged in (whole.replace("bird", "fish"), whole[:-9], "[]", "{}", "\xff"):
        given.write_text(damaged, encoding="latin-1")
        for read in (Centers.open, lambda path: list(verify(path))):
            with pytest.raises(ArtifactInvalid, match=f"{GIVEN_NAMES} is damaged or was edited"):
                read(centers)
    given.write_text(whole)
    assert Centers.open(centers).name(1) == "bird"
    write_centers(tmp_path / "others", np.eye(4, 8), config={"seed": 1})
    (tmp_path / "others" / GIVEN_NAMES).write_text(whole)
    with pytest.raises(ArtifactInvalid, match="got names of other centers"):
        Centers.open(tmp_path / "others")
    assert json.loads(whole)["centers"] == open_artifact(centers).digest


def test_the_names_that_a_server_keeps_in_its_state_are_set_too_and_never_those_of_others(
    centers, tmp_path
):
    lookup = Lookup(Centers.open(centers), open_artifact(centers), tmp_path)
    lookup.rename(1, "wolf")
    lookup.rename(2, None)
    file = tmp_path / "names" / f"{open_artifact(centers).digest}.json"
    with pytest.raises(InvalidInput, match="must hold names of the centers 000"):
        read_names_file(file, 4, digest="0" * 64)
    set_names(centers, file)
    assert Centers.open(centers).names == ("cat", "wolf", None, None)
