"""`mlcd name` by words, captions and metadata, on the clusters of scanned digits."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.labels import LabelTable
from mlcd.artifacts.manifest import open_artifact
from mlcd.artifacts.name_evidence import read_evidence
from mlcd.commands.name_clusters import read_words
from mlcd.errors import InvalidInput, NotFound
from mlcd.pipelines.name import set_names
from mlcd.pipelines.name_by_terms import name_by_captions, name_by_metadata
from mlcd.pipelines.name_by_words import name_by_words
from mlcd.pipelines.text_files import read_texts
from mlcd.pipelines.verify import verify
from mlcd.progress import Reporter
from mlcd.types import unit_rows
from tests.conftest import call_mlcd, refuse, succeed

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SILENT = Reporter("silent")


class FakeEncoder:
    """A text tower that puts a digit's name at the mean of its images, and other words anywhere."""

    name, engine, precision = "fake", "none", "fp32"

    def __init__(self, images: EmbeddingsArtifact) -> None:
        rows, classes = images.load(), np.array(images.class_names)
        self.fingerprint, self.dimension = images.fingerprint, images.dimension
        self._rows = {
            name: unit_rows(rows[classes == str(digit)].mean(axis=0)[None])[0]
            for digit, name in enumerate(DIGITS)
        }

    def tokenizer(self, texts):
        return texts

    def encode(self, texts):
        return np.stack([self._row(text) for text in texts])

    def _row(self, text):
        for name, row in self._rows.items():
            if f" {name}" in text:
                return row
        if "nothing" in text:
            return np.zeros(self.dimension, np.float32)
        seed = sum(map(ord, text))
        return unit_rows(np.random.default_rng(seed).standard_normal((1, self.dimension)))[0]


@pytest.fixture
def centers(journey, tmp_path):
    shutil.copytree(journey / "centers", tmp_path / "centers")
    return tmp_path / "centers"


def majority(centers, journey):
    """The digit that most members of each center show, by its name; and the share of it."""
    table = LabelTable.open(journey / "labels")
    first = np.concatenate([ids for ids, _ in table.first_labels()])
    keys = table.read_keys().to_pylist()
    counts = [Counter() for _ in range(len(Centers.open(centers).sizes))]
    for key, center in zip(keys, first.tolist(), strict=True):
        counts[center][DIGITS[int(Path(key).parent.name)]] += 1
    return [
        (each.most_common(1)[0][0], each.most_common(1)[0][1] / each.total()) for each in counts
    ]


def named(centers):
    artifact = open_artifact(centers)
    given = json.loads((centers / "given-names.json").read_text())
    return read_evidence(artifact, given["evidence"]).clusters


def test_captions_name_clusters_and_show_why(centers, journey, tmp_path, caplog):
    keys = LabelTable.open(journey / "labels").keys
    rows = [
        {"id": key, "text": f"The {DIGITS[int(Path(key).parent.name)]}, a digit"} for key in keys
    ]
    file = tmp_path / "captions.jsonl"
    file.write_text("\n".join(map(json.dumps, [*rows, {"id": "gone.png", "text": "a cat"}])))
    labels = journey / "labels"
    command = ("name", centers, "--captions", file, "--labels", labels, "--json")
    told = call_mlcd(*command)
    assert told.returncode == 2
    assert "has the key 'gone.png'" in told.stderr
    assert f"(1 of {len(keys) + 1} keys)" in told.stderr
    result = succeed(*command, "--allow-unmatched")
    assert "has the key 'gone.png'" in caplog.text
    facts = json.loads(result.stdout)
    assert facts["evidence"] == "0001.json"
    clusters = named(centers)
    assert Centers.open(centers).names == tuple(each["name"] for each in clusters)
    for each, (digit, share) in zip(clusters, majority(centers, journey), strict=True):
        if share > 0.55:
            assert each["name"] == digit
            assert each["terms"][0]["share"] == pytest.approx(share, abs=1e-6)
            assert all(digit in typical["caption"] for typical in each["typical"])
            assert {typical["key"] for typical in each["typical"]} <= set(keys)
        if share < 0.45:
            assert each["name"] is None
    assert facts["num_named"] >= len(clusters) / 2
    assert all(finding.checked for finding in verify(centers) if finding.kind == "centers")
    with pytest.raises(InvalidInput, match=r"has the key"):
        file.write_text('{"id": "gone.png", "text": "a cat"}')
        name_by_captions(centers, read_texts(file), labels)
    with pytest.raises(InvalidInput, match="must be labels of the centers"):
        name_by_captions(journey / "model" / "centers", read_texts(file), labels)


def test_words_name_clusters_and_names_by_hand_stay(centers, journey, tmp_path):
    images = EmbeddingsArtifact.open(journey / "features")
    words, hand = tmp_path / "words.txt", tmp_path / "names.tsv"
    words.write_text("\n".join([*DIGITS, "", "nothing", "a lighthouse", "two", "red", "a chair"]))
    with pytest.raises(NotFound, match="give --embeddings"):
        name_by_words(centers, read_texts(words), FakeEncoder(images), SILENT)
    hand.write_text("0\tmine\n")
    set_names(centers, hand)
    options = {"embeddings": journey / "features"}
    first = name_by_words(centers, read_texts(words), FakeEncoder(images), SILENT, **options)
    content = (centers / "names" / "0001.json").read_bytes()
    again = name_by_words(centers, read_texts(words), FakeEncoder(images), SILENT, **options)
    assert (again.num_changed, again.num_named, again.evidence) == (0, first.num_named, "0001.json")
    assert [path.name for path in (centers / "names").iterdir()] == ["0001.json"]
    assert (centers / "names" / "0001.json").read_bytes() == content
    names = Centers.open(centers).names
    assert names[0] == "mine"
    assert json.loads(content)["made_of"]["words"]["used"] == 13
    sure = [
        (name, digit)
        for name, (digit, share) in zip(names[1:], majority(centers, journey)[1:], strict=True)
        if share > 0.8
    ]
    assert sum(name == digit for name, digit in sure) >= 0.8 * len(sure) > 0
    # in place, the embeddings are found
    model = FakeEncoder(images)
    model.fingerprint = "0" * 64
    with pytest.raises(InvalidInput, match="the words must be of the same model"):
        name_by_words(journey / "centers", read_texts(words), model, SILENT)
    for bad in ("a\u0007b", "x" * 201):
        words.write_text(f"one\n{bad}\n")
        with pytest.raises(InvalidInput, match=r"got text 2 of"):
            name_by_words(centers, read_texts(words), FakeEncoder(images), SILENT, **options)
    words.write_text("one\nnothing\n")
    with pytest.raises(InvalidInput, match="at least two words"):
        name_by_words(centers, read_texts(words), FakeEncoder(images), SILENT, **options)


def test_a_field_of_a_collection_names_clusters(journey, tmp_path):
    centers, collection = tmp_path / "centers", journey / "collections" / "demo"
    shutil.copytree(journey / "model" / "centers", centers)
    naming = name_by_metadata(centers, "class_name", collection, least_share=0.6)
    for each in named(centers):
        if each["name"] is not None:
            assert each["terms"][0]["share"] >= 0.6
        assert each["members"] >= 0
    assert naming.num_centers == len(named(centers))
    with pytest.raises(
        InvalidInput,
        match="have the field 'absent', found none: give one of its fields: class_name",
    ):
        name_by_metadata(centers, "absent", collection)
    with pytest.raises(InvalidInput, match="least share must be in"):
        name_by_metadata(centers, "class_name", collection, least_share=1.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give one of --set, --words, --captions and --metadata"),
        (("--set", "a", "--words", "b", "--model", "c"), "give one of"),
        (("--words", "a"), "--words and --model require each other"),
        (("--set", "a", "--labels", "b"), "--captions and --labels require each other"),
        (("--metadata", "a"), "--metadata and --collection require each other"),
        (("--set", "a", "--embeddings", "b"), "--embeddings requires --words"),
    ],
)
def test_options_that_do_not_go_together_are_told(centers, options, message):
    refuse("name", centers, *options, contains=message)


def test_the_words_of_imagenet_come_with_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = read_words(Path("imagenet"))
    assert len({word.casefold() for word in words.texts}) == len(words.texts) > 1500
    assert {"goldfish", "tabby"} <= set(words.texts)
    assert words.sha256 == read_words(Path("imagenet")).sha256
    with pytest.raises(NotFound):
        read_words(Path("openimages"))
    (tmp_path / "imagenet").write_text("a file of one's own comes first")
    with pytest.raises(InvalidInput):
        read_words(Path("imagenet"))
