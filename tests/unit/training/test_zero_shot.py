"""Zero-shot classification: CLIP's ensembles, honest names and ties, numbers with their protocol."""

import json
import shutil
from contextlib import closing

import numpy as np
import pyarrow.parquet as pq
import pytest

from mlcd.encoders import open_encoder, open_text_encoder
from mlcd.errors import InvalidInput, NotFound
from mlcd.training.evaluation.intervals import bootstrap
from mlcd.training.evaluation.texts.class_names import names_of, read_names, table_of_set
from mlcd.training.evaluation.texts.clip_prompts import set_prompts
from mlcd.training.evaluation.texts.prompt_sets import read_prompts
from mlcd.training.evaluation.texts.zero_shot import (
    class_prompts,
    classifier,
    ranks,
    zero_shot_figures,
)
from mlcd.types import unit_rows
from tests.conftest import call_mlcd, refuse, succeed
from tests.unit.training.running import evaluated


@pytest.fixture(scope="module")
def animals(digits, tmp_path_factory):
    """Pictures in two folders that are names for a model of few words."""
    folder = tmp_path_factory.mktemp("animals")
    for digit, name in (("0", "dog"), ("1", "old_cat"), ("2", "sky")):
        shutil.copytree(digits / digit, folder / name)
    return folder


def test_a_class_is_the_mean_of_its_unit_prompts_made_a_unit_row():
    """The formula of CLIP's notebook and of open_clip's builder, written out in float64."""
    generator = np.random.default_rng(0)
    names, templates = [("cat", "kitten"), ("dog",)], ["a {}", "the {}", "my {}"]
    prompts, counts = class_prompts(names, templates)
    assert prompts[:4] == ["a cat", "the cat", "my cat", "a kitten"]
    assert counts.tolist() == [6, 3]
    raw = generator.standard_normal((9, 16))
    rows = classifier(unit_rows(raw), counts)
    for place, part in enumerate((raw[:6], raw[6:])):
        expected = (part / np.linalg.norm(part, axis=1, keepdims=True)).mean(axis=0)
        expected /= np.linalg.norm(expected)
        assert np.abs(rows[place] - expected).max() < 1e-6


def test_an_equally_near_class_counts_against_the_image():
    images = unit_rows(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    classes = unit_rows(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    assert ranks(images, classes, np.array([0, 1, 2])).tolist() == [1, 1, 0]


def test_figures_are_those_of_the_definition():
    generator = np.random.default_rng(1)
    rank, right = generator.integers(0, 9, 300), generator.integers(0, 8, 300)
    found = zero_shot_figures(rank, right, 9)
    assert found.metrics["zero_shot_top1"] == pytest.approx((rank == 0).mean())
    assert found.metrics["zero_shot_top5"] == pytest.approx((rank < 5).mean())
    per_class = [(rank[right == one] == 0).mean() for one in range(8)]
    assert found.metrics["zero_shot_mean_per_class"] == pytest.approx(np.mean(per_class))
    for name, (low, high) in found.intervals.items():
        assert low < found.metrics[name] < high
    assert "zero_shot_top5" not in zero_shot_figures(rank, right, 5).metrics


def test_the_interval_of_a_share_is_about_two_standard_errors_each_way():
    right = np.arange(400) % 4 == 0
    low, high = bootstrap(lambda chosen: right[chosen].mean(), 400)
    assert low == pytest.approx(0.25 - 1.96 * 0.0217, abs=0.006)
    assert high == pytest.approx(0.25 + 1.96 * 0.0217, abs=0.006)


def test_the_command_measures_what_the_definition_says(two_tower_model, animals, tmp_path):
    out, table = tmp_path / "out", tmp_path / "names.json"
    table.write_text(json.dumps({"dog": ["dog", "two dogs"], "old_cat": "cat", "sky": "the sky"}))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a photo of {}\n{}\n")
    command = ("zero-shot", two_tower_model, "--test", animals, "--prompts", prompts)
    record = evaluated(*command, "--names", table, "--out", out)
    files = sorted(animals.glob("*/*.png"))
    with closing(open_encoder(str(two_tower_model))) as encoder:
        pixels = [encoder.preprocess.prepare(file.read_bytes()) for file in files]
        images = encoder.encode(np.stack(pixels))
    classes = []
    with closing(open_text_encoder(str(two_tower_model))) as encoder:
        for names in (["dog", "two dogs"], ["cat"], ["the sky"]):
            texts = [each for name in names for each in (f"a photo of {name}", name)]
            row = encoder.encode(encoder.tokenizer(texts)).astype(np.float64).mean(axis=0)
            classes.append(row / np.linalg.norm(row))
    right = np.array([["dog", "old_cat", "sky"].index(file.parent.name) for file in files])
    expected = (images @ np.stack(classes).T).argmax(axis=1) == right
    assert record["metrics"]["zero_shot_top1"] == pytest.approx(expected.mean())
    assert record["metrics"]["test_images"] == len(files)
    protocol = record["protocol"]
    assert protocol["prompts"] == "prompts.txt"
    assert protocol["templates"] == 2
    assert protocol["classes"] == 3
    assert len(protocol["split"]) == len(protocol["prompts_sha256"]) == 64
    kept = pq.read_table(out / "images-00000.parquet").to_pylist()
    assert [one["key"] for one in kept] == [str(file.relative_to(animals)) for file in files]
    assert [one["right"] for one in kept] == expected.tolist()
    assert evaluated(*command, "--names", table, "--out", out) == record  # read back
    assert any("trained on" in reason for reason in record["seen"]["unknown"])


def test_embeddings_of_the_model_measure_the_same(two_tower_model, animals, journey, tmp_path):
    call_mlcd("embed", animals, tmp_path / "rows", "--model", two_tower_model)
    command = ("zero-shot", two_tower_model, "--prompts", "simple", "--test")
    assert (
        evaluated(*command, tmp_path / "rows")["metrics"] == evaluated(*command, animals)["metrics"]
    )
    refuse("evaluate", *command, journey / "features", contains="was not made by")
    no_texts = call_mlcd("evaluate", "zero-shot", journey / "model", "--test", animals)
    assert "embedding texts needs a text tower" in no_texts.stderr


def test_two_evaluations_of_the_same_images_are_compared(two_tower_model, animals, tmp_path):
    pictures = shutil.copytree(animals, tmp_path / "pictures")
    command = ("evaluate", "zero-shot", two_tower_model, "--test", pictures)
    for name in ("simple", "cifar10"):
        succeed(*command, "--prompts", name, "--out", tmp_path / name)
    told = call_mlcd("evaluate", "compare", tmp_path / "simple", tmp_path / "cifar10", "--json")
    facts = json.loads(told.stdout.splitlines()[-1])
    first, second = (
        pq.read_table(tmp_path / name / "images-00000.parquet")["right"].to_numpy()
        for name in ("simple", "cifar10")
    )
    assert facts["only_first"] == (first & ~second).sum()
    assert facts["difference"] == pytest.approx(first.mean() - second.mean())
    shutil.rmtree(pictures / "sky")
    succeed(*command, "--out", tmp_path / "fewer")
    refused = call_mlcd("evaluate", "compare", tmp_path / "simple", tmp_path / "fewer")
    assert "must have the same images" in refused.stderr


def test_mcnemars_test_is_the_binomial_one():
    from scipy.stats import binomtest

    from mlcd.training.evaluation.compare import mcnemar

    for one, other in ((0, 0), (3, 9), (40, 17), (5, 5), (700, 641)):
        expected = binomtest(one, one + other).pvalue if one + other else 1.0
        assert mcnemar(one, other) == pytest.approx(expected, rel=1e-9)


def test_names_nobody_would_say_are_refused():
    assert names_of(["soccer_ball", "animals/dog"], None) == [("soccer ball",), ("dog",)]
    for folder in ("n02099601", "n02099601_golden_retriever", "tench, Tinca tinca"):
        with pytest.raises(InvalidInput, match=r"synset of ImageNet.*--names"):
            names_of([folder, "dog"], None)
    with pytest.raises(InvalidInput, match="are both called 'dog'"):
        names_of(["a/dog", "b/dog"], None)
    with pytest.raises(InvalidInput, match="lacks a name for class cat"):
        names_of(["dog", "cat"], {"dog": ("dog",)})


def test_tables_of_names_are_read_and_their_damage_is_named(tmp_path):
    table = tmp_path / "names.csv"
    table.write_text("wnid,name\nn02099601,golden retriever\nn02099601,retriever\nn1,cat\n")
    assert read_names(str(table)) == {
        "n02099601": ("golden retriever", "retriever"),
        "n1": ("cat",),
    }
    table.write_text('wnid,name\nn02099601,"tench, Tinca tinca"\n')
    with pytest.raises(InvalidInput, match="lists the synonyms"):
        read_names(str(table))
    table.write_text("wnid\nn02099601\n")
    with pytest.raises(InvalidInput, match="needs a second column"):
        read_names(str(table))
    stated = tmp_path / "names.json"
    for content, message in (
        ("[]", "it must be an object"),
        ('{"a": []}', "a needs a name"),
        ('{"a": "n02099601"}', "cannot be a name of class a"),
        ("{", "is not a table of names"),
    ):
        stated.write_text(content)
        with pytest.raises(InvalidInput, match=message):
            read_names(str(stated))
    with pytest.raises(NotFound):
        read_names(str(tmp_path / "other.json"))


def test_prompts_are_sets_or_files(tmp_path):
    assert len(read_prompts("simple").templates) == 7
    assert len(read_prompts("clip").templates) == 80
    assert read_prompts("mnist").templates == ('a photo of the number: "{}".',)
    file = tmp_path / "mine.json"
    file.write_text('["a {}", "the {}"]')
    assert read_prompts(str(file)).templates == ("a {}", "the {}")
    for content in ('["a {} {}"]', "{}", "[1]", "[]"):
        file.write_text(content)
        with pytest.raises(InvalidInput):
            read_prompts(str(file))
    with pytest.raises(NotFound):
        read_prompts("complicated")


def test_clips_prompts_cover_26_sets_with_distinct_folders():
    sets = set_prompts()
    assert len(sets) == 26
    assert len(sets["kinetics700"].classes) == 700
    for name, prompts in sets.items():
        num_names = sum(map(len, prompts.classes))
        assert len(table_of_set(name)) == num_names
        assert all(template.count("{}") == 1 for template in prompts.templates)
    assert table_of_set("fer2013")["smiling"] == ("happy", "smiling")
