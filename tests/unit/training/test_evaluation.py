"""Evaluation: the same numbers from any number of processes, and a training that does not notice
it.
"""

import copy
import json
import shutil

import numpy as np
import pytest
import torch

from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.images.sources import open_source
from mlcd.models.servable import Servable
from mlcd.progress import Reporter
from mlcd.training.evaluation.knn import count_votes, knn
from mlcd.training.evaluation.report import KnnProtocol, Subject, evaluate_all
from mlcd.training.evaluation.representations import ImageSet, encode, encode_images
from mlcd.training.evaluation.splits import (
    VALIDATION_FRACTION,
    LabeledRows,
    split_digest,
    split_samples,
)
from mlcd.training.evaluation.while_training import check_evaluation, evaluate_model
from mlcd.types import unit_rows
from mlcd.world import World
from tests.conftest import succeed
from tests.ranks import run_ranks
from tests.unit.training import evaluating


@pytest.fixture(scope="module")
def pictures(digits, tmp_path_factory):
    """The digits with files that are no images among them, and one that has no class."""
    folder = tmp_path_factory.mktemp("pictures") / "digits"
    shutil.copytree(digits, folder)
    for name in ("0/0000.png", "5/9999.png"):
        (folder / name).write_bytes(b"no image")
    shutil.copy(digits / "1" / "0001.png", folder / "loose.png")
    return folder


def test_three_processes_measure_what_one_does(pictures, tmp_path):
    size = 3
    run_ranks(evaluating.evaluate, size, str(tmp_path), str(pictures))
    expected = evaluating.measure(World(), pictures)
    assert len(expected["rows"]) == 199
    for rank in range(size):
        result = torch.load(tmp_path / f"evaluation-{size}-{rank}.pt")
        rows, expected_rows = result.pop("rows"), expected["rows"]
        assert torch.allclose(rows, expected_rows, atol=1e-6)
        assert result == {name: value for name, value in expected.items() if name != "rows"}


def test_rows_are_those_of_the_model_in_the_order_of_the_source(pictures):
    model, images = evaluating.model(), evaluating.prepared(pictures)
    for features in ("embedding", "pooled"):
        found = encode(model, images, features=features, world=World())
        assert found.usable.tolist() == [
            entry.key not in ("0/0000.png", "5/9999.png") for entry in images.images.entries
        ]
        samples = encode_images(model, images, features=features, world=World())
        place = samples.keys.index("7/0007.png")
        entry = next(entry for entry in images.images.entries if entry.key == "7/0007.png")
        pixels = torch.from_numpy(model.preprocess.prepare(images.images.source.read(entry)))[None]
        with torch.no_grad():
            normalized = (pixels.float() / 255 - model.mean) / model.std
            expected = model.trunk(normalized, "pooled") if features == "pooled" else model(pixels)
        assert torch.allclose(torch.from_numpy(samples.rows[place]), expected[0], atol=1e-5)
        assert "loose.png" not in samples.keys
        assert np.array_equal(samples.rows, found.rows)


def random_samples(num, classes=4):
    generator = np.random.default_rng(0)
    rows = unit_rows(generator.standard_normal((num, 8)))
    names = [str(each) for each in generator.integers(0, classes, num)]
    return LabeledRows(rows, [f"{n:03d}" for n in range(num)], (np.arange(num) + 0.5) / num, names)


def test_without_a_held_out_share_every_image_is_asked_for_and_does_not_vote_for_itself():
    """Written out: for each image the votes of the five nearest others, by scores in float64."""
    whole = random_samples(60)
    scores = whole.rows.astype(np.float64) @ whole.rows.astype(np.float64).T
    right = 0
    for row in range(60):
        others = [other for other in np.argsort(-scores[row]) if other != row][:5]
        votes = np.zeros(4)
        for other in others:
            votes[whole.classes[other]] += np.exp(scores[row, other] / 0.07)
        right += votes.argmax() == whole.classes[row]
    measured = dict(knn(whole, neighbors=5, hold_out=0.0))
    assert measured == {"knn_accuracy": right / 60, "test_images": 60}


def test_an_image_with_many_equals_does_not_vote_for_itself():
    """Rows 0..4 are the same vector, and row 4 asks for two neighbors: 0, 1 and 2 are found, and
    not itself.
    """
    rows = unit_rows(np.array([[1.0, 0.0]] * 5 + [[0.0, 1.0]]))
    classes = np.array([0, 1, 1, 2, 2, 2])
    settings = {"num_classes": 3, "neighbors": 2}
    votes = count_votes(rows[[4]], rows, classes, self_rows=np.array([4]), **settings)
    # 0 and 1 have one vote each; with the third neighbor it would be 1.
    assert votes.argmax(axis=1).tolist() == [0]
    votes = count_votes(rows[[0]], rows, classes, self_rows=np.array([0]), **settings)
    assert votes.argmax(axis=1).tolist() == [1]


def test_mean_per_class_weighs_classes_alike():
    rows = unit_rows(np.array([[1.0, 0.0]] * 9 + [[0.9, 0.1]]))
    names = ["a"] * 9 + ["b"]
    one = LabeledRows(rows, [str(n) for n in range(10)], np.full(10, 0.5), names)
    assert dict(knn(one, neighbors=3, hold_out=0.0))["knn_accuracy"] == 0.9
    assert (
        dict(knn(one, neighbors=3, hold_out=0.0, metric="mean-per-class"))["knn_mean_per_class"]
        == 0.5
    )


def test_the_parts_of_a_split_are_nested_shares_of_each_class():
    splits = (np.arange(100) + 0.5) / 100
    split = split_samples(splits, 0.25)
    assert (split.test == (splits <= 0.25)).all()
    assert split.validation.sum() == VALIDATION_FRACTION * 75
    assert (split.train.astype(int) + split.validation + split.test == 1).all()


def test_the_digest_of_a_split_tells_classes_keys_and_parts_and_no_order():
    keys, names, test = ["a", "b", "c"], ["x", "x", "y"], np.array([True, False, False])
    digest = split_digest(keys, names, test)
    order = [2, 0, 1]
    assert split_digest([keys[n] for n in order], [names[n] for n in order], test[order]) == digest
    others = [(["a", "b", "d"], names, test), (keys, ["x", "y", "y"], test), (keys, names, ~test)]
    assert len({digest, *(split_digest(*other) for other in others)}) == 4


def test_a_model_in_training_is_left_as_it_was(digits):
    model = evaluating.model()
    model.train()
    model.trunk.blocks[0].norm1.eval()
    modes = [module.training for module in model.modules()]
    weights = copy.deepcopy(model.state_dict())
    config = evaluating.run_config(digits, linear_probe=True)
    images = check_evaluation(config)
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002 - the global state is what must not move
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first = evaluate_model(model, config, world=World(), images=images)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert all(
        parameter.grad is None and parameter.requires_grad for parameter in model.parameters()
    )
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002
    assert first.keys() == {"knn", "linear_probe"}
    assert 0.2 < first["knn"] <= 1
    assert evaluate_model(model, config, world=World(), images=images) == first
    assert evaluate_model(model, config, world=World()) == first


def test_pixels_are_decoded_once_where_they_fit(digits, tmp_path):
    folder = tmp_path / "digits"
    shutil.copytree(digits, folder)
    config = evaluating.run_config(folder)
    unlimited = check_evaluation(config)
    nothing = check_evaluation(
        config.model_copy(update={"data": config.data.model_copy(update={"memory_gib": 0})})
    )
    results = [
        evaluate_model(evaluating.model(), config, world=World(), images=each)
        for each in (unlimited, nothing)
    ]
    shutil.rmtree(folder)
    assert (
        results[0]
        == results[1]
        == evaluate_model(evaluating.model(), config, world=World(), images=unlimited)
    )
    with pytest.raises(InvalidInput, match=r"no image of .* can be decoded"):
        evaluate_model(evaluating.model(), config, world=World(), images=nothing)


def test_images_of_evaluation_are_split_as_the_command_splits_them(digits, journey):
    """The numbers of a run's log are those of `mlcd evaluate` on its checkpoint."""
    checkpoint = max((journey / "run" / "checkpoints").iterdir())
    config = evaluating.run_config("elsewhere", images=str(digits), linear_probe=True)
    logged = evaluate_model(Servable.read(checkpoint / "weights"), config, world=World())
    for kind, name in (("knn", "knn"), ("linear-probe", "linear_probe")):
        told = succeed("evaluate", kind, checkpoint, "--images", digits, "--json")
        (result,) = json.loads(told.stdout.splitlines()[-1])["results"]
        assert result["metrics"][f"{name}_accuracy"] == logged[name]


def test_a_run_that_cannot_be_evaluated_is_refused_before_its_first_step(digits, tmp_path):
    loose, single = tmp_path / "loose", tmp_path / "single"
    shutil.copytree(digits / "0", loose)
    shutil.copytree(digits / "0", single / "zero")
    for images, error, message in (
        (loose, ConfigInvalid, "no image of .* has a known class"),
        (single, InvalidInput, "are of one class, zero"),
    ):
        with pytest.raises(error, match=message):
            check_evaluation(evaluating.run_config(digits, images=str(images)))
    (single / "one").mkdir()
    shutil.copy(digits / "1" / "0001.png", single / "one")
    shutil.copy(digits / "1" / "0011.png", single / "one")
    check_evaluation(evaluating.run_config(digits, images=str(single)))
    # Its two images stand at 1/4 and 3/4 of their class.
    config = evaluating.run_config(single, linear_probe=True)
    with pytest.raises(InvalidInput, match="but one lacks one"):
        check_evaluation(
            config.model_copy(update={"data": config.data.model_copy(update={"hold_out": 0.75})})
        )
    with pytest.raises(
        ConfigInvalid, match=r"requires evaluation\.knn or evaluation\.linear_probe"
    ):
        check_evaluation(evaluating.run_config(digits, knn=False))
    nothing_held_out = config.model_copy(
        update={"data": config.data.model_copy(update={"hold_out": 0.0})}
    )
    with pytest.raises(ConfigInvalid, match="leaves no image to evaluate on"):
        check_evaluation(nothing_held_out)
    assert check_evaluation(evaluating.run_config(digits, every_steps=None)) is None


def test_a_mixture_needs_images_of_its_own_to_evaluate_on(digits):
    config = evaluating.run_config(digits)
    mix = [{"images": str(digits), "labels": "a"}, {"images": str(digits), "labels": "b"}]
    fields = {**config.model_dump(mode="json"), "data": {"mix": mix}}
    mixed = type(config).model_validate(fields)
    with pytest.raises(ConfigInvalid, match=r"several data sets: set evaluation\.images"):
        check_evaluation(mixed)


def test_only_images_of_known_class_are_listed_and_their_splits_are_of_the_whole_source(pictures):
    images = ImageSet.of(open_source(str(pictures)))
    assert len(images.entries) == len(images.splits) == len(images.class_names) == 201
    assert {entry.key.split("/")[0] for entry in images.entries} == set("0123456789")


def test_each_line_names_its_own_and_kept_results_come_in_the_order_asked_for(journey, tmp_path):
    """Two artifacts of one name: by the last part alone nobody could tell them apart."""
    first, second = (tmp_path / place / "emb" for place in ("a", "b"))
    for source, path in (("features", first), ("pixels", second)):
        shutil.copytree(journey / source, path)
    protocol = KnnProtocol("embedding", "accuracy", 0.2, 5)

    def measured(*paths):
        results = evaluate_all(
            paths, protocol, Subject(), out=tmp_path / "out", reporter=Reporter("silent")
        )
        return {result["representation"]: result["digest"] for result in results}

    found = measured(first, second)
    assert list(found) == ["a/emb", "b/emb"]
    assert found["a/emb"] != found["b/emb"]
    again = measured(second, first)  # read from `out`
    assert list(again.items()) == list(found.items())[::-1]
