"""The metrics of CLIP's data sets are those of their definitions and of scikit-learn."""

import json

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from mlcd.errors import InvalidInput, NotFound
from mlcd.training.evaluation.intervals import bootstrap
from mlcd.training.evaluation.label_tables import DIFFICULT, read_labels
from mlcd.training.evaluation.linear_probe import fit_probe
from mlcd.training.evaluation.measured import average_folds, measure_answers
from mlcd.training.evaluation.scores import answers, eleven_point_precision, roc_auc
from mlcd.training.evaluation.splits import LabeledRows, Split, read_split
from mlcd.training.evaluation.voc_probe import Rankings, voc_probe
from mlcd.types import unit_rows


def devkit(ranking, positive):
    """VOC 2007's definition, one recall at a time; equal scores come together."""
    precisions, recalls = [], []
    for threshold in sorted(set(ranking.tolist()), reverse=True):
        shown = ranking >= threshold
        precisions.append((positive & shown).sum() / shown.sum())
        recalls.append((positive & shown).sum())
    best = []
    for tenth in range(11):
        reached = [
            precision
            for precision, found in zip(precisions, recalls, strict=True)
            if 10 * int(found) >= tenth * int(positive.sum())
        ]
        best.append(max(reached))
    return sum(best) / 11


@pytest.mark.parametrize("distinct", [5, 1000])
def test_eleven_points_are_vocs(distinct):
    generator = np.random.default_rng(distinct)
    for _ in range(20):
        ranking = generator.integers(0, distinct, 70) / distinct
        positive = generator.random(70) < 0.3
        expected = devkit(ranking, positive)
        assert eleven_point_precision(ranking, positive) == pytest.approx(expected, abs=1e-12)
    # By hand: right, wrong, right. Recalls up to a half have precision 1, the others 2/3.
    by_hand = eleven_point_precision(np.array([3.0, 2.0, 1.0]), np.array([True, False, True]))
    assert by_hand == pytest.approx((6 * 1 + 5 * 2 / 3) / 11)


def test_the_area_under_the_curve_is_scikit_learns():
    generator = np.random.default_rng(0)
    for distinct in (4, 1000):
        ranking = generator.integers(0, distinct, 200).astype(np.float64)
        positive = generator.random(200) < 0.4
        assert roc_auc(ranking, positive) == pytest.approx(roc_auc_score(positive, ranking))
    assert np.isnan(roc_auc(ranking, np.ones(200, dtype=np.bool_)))


def test_answers_have_every_metric_of_the_26_sets():
    generator = np.random.default_rng(2)
    scores, classes = generator.standard_normal((90, 7)), generator.integers(0, 7, 90)
    found = answers(scores, classes)
    predicted, order = scores.argmax(axis=1), np.argsort(-scores, axis=1)[:, :5]
    top1, top5 = (predicted == classes).mean(), (order == classes[:, None]).any(axis=1).mean()
    assert found.score("accuracy") == pytest.approx(top1)
    assert found.score("mean-top1-top5") == pytest.approx((top1 + top5) / 2)
    with pytest.raises(InvalidInput, match="requires two classes, got 7"):
        found.score("roc-auc")
    two = answers(scores[:, :2], classes % 2)
    expected = roc_auc_score(classes % 2, scores[:, 1] - scores[:, 0])
    assert two.score("roc-auc") == pytest.approx(expected)
    with pytest.raises(InvalidInput, match="requires more than 5 classes"):
        two.score("mean-top1-top5")
    tied = answers(np.zeros((2, 3)), np.array([0, 2]))
    assert tied.rank.tolist() == [0, 2]


def clouds(num, classes, seed=0):
    generator = np.random.default_rng(seed)
    of_row = np.arange(num) % classes
    centers = generator.standard_normal((classes, 6))
    rows = unit_rows(centers[of_row] + 0.8 * generator.standard_normal((num, 6)))
    names = [f"class {number}" for number in of_row]
    return LabeledRows(rows, [f"{n:03d}" for n in range(num)], (np.arange(num) + 0.5) / num, names)


def test_a_probe_on_official_folds_is_the_mean_over_them(tmp_path):
    """STL-10's protocol: each fold is trained on alone, and all are tested on the same images."""
    samples = clouds(150, 3)
    keys = list(samples.keys)
    file = tmp_path / "split.json"
    file.write_text(json.dumps({"folds": [keys[:45], keys[45:90]], "test": keys[90:]}))
    split = read_split(file)
    parts = list(split.parts(samples))
    assert [part.own_split.test.sum() for part in parts] == [60, 60]
    folds = []
    for part in parts:
        probe = fit_probe(part, hold_out=0.2, metric="accuracy")
        folds.append(measure_answers("probe", probe.answers, "accuracy"))
    mean = average_folds(folds)
    single = [fold.metrics["probe"] for fold in folds]
    assert single[0] != single[1]
    assert mean.metrics["probe"] == pytest.approx(np.mean(single))
    assert mean.metrics["deviation_of_folds"] == pytest.approx(np.std(single, ddof=1))
    low, high = mean.intervals["probe"]
    assert low < mean.metrics["probe"] < high
    assert mean.right is None


def test_a_split_file_is_taken_as_it_stands(tmp_path):
    samples = clouds(60, 2)
    keys = list(samples.keys)
    file = tmp_path / "split.json"
    file.write_text(json.dumps({"train": keys[:30], "val": keys[30:40], "test": keys[40:55]}))
    (part,) = read_split(file).parts(samples)
    given = part.split(0.5)
    assert [keys for keys, inside in zip(part.keys, given.train, strict=True) if inside] == keys[
        :30
    ]
    assert given.validation.sum() == 10
    assert given.test.sum() == 15
    for content, error, message in (
        ({"train": keys[:30], "test": keys[29:]}, InvalidInput, "must occur once"),
        ({"train": keys[:30], "test": ["other.png"]}, InvalidInput, r"the key 'other\.png'"),
        ({"train": keys[:30]}, InvalidInput, "test must be a list of keys"),
        ({"test": keys}, InvalidInput, "must contain either train or folds, got neither"),
        ({"train": keys[::2], "test": keys[1:4:2]}, InvalidInput, "no image to train on has it"),
        ([], InvalidInput, "must contain either train or folds, got neither"),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(error, match=message):
            list(read_split(file).parts(samples))
    with pytest.raises(NotFound):
        read_split(tmp_path / "other.json")


def test_difficult_objects_count_neither_way():
    scores = np.array([[4.0], [3.0], [2.0], [1.0]])
    tags = np.array([[1], [DIFFICULT], [1], [0]], dtype=np.int8)
    assert Rankings(scores, tags).mean_precision() == 1.0
    tags[1] = 0
    assert Rankings(scores, tags).mean_precision() < 1.0


def test_the_probe_of_several_labels_finds_them():
    generator = np.random.default_rng(3)
    tags = (generator.random((240, 3)) < 0.4).astype(np.int8)
    rows = unit_rows(tags @ generator.standard_normal((3, 8)) + 0.3 * generator.random((240, 8)))
    tags[5, 0] = DIFFICULT
    part = np.arange(240) % 4
    split = Split(part < 2, part == 2, part == 3)
    found = voc_probe(rows, tags, split)
    assert found.metrics["linear_probe_map_11"] > 0.9
    assert found.metrics["test_images"] == 60
    low, high = found.intervals["linear_probe_map_11"]
    assert low <= found.metrics["linear_probe_map_11"] <= high
    tags[split.test, 1] = 0
    with pytest.raises(InvalidInput, match="label 1 of 3 cannot be probed: no test image has it"):
        voc_probe(rows, tags, split)


def test_a_table_of_labels_is_read_and_its_damage_is_named(tmp_path):
    file = tmp_path / "labels.jsonl"
    file.write_text(
        '{"path": "a.jpg", "labels": ["cat"], "difficult": ["dog", "cat"]}\n'
        '{"path": "b.jpg", "labels": ["dog", "cat"]}\n\n{"path": "c.jpg", "labels": []}\n'
    )
    table = read_labels(file)
    assert table.names == ("cat", "dog")
    assert table.of(["b.jpg", "a.jpg", "c.jpg"]).tolist() == [[1, 1], [1, DIFFICULT], [0, 0]]
    for line in ("{}", "[]", '{"path": "b.jpg", "labels": "cat"}', "{"):
        file.write_text(f'{{"path": "a.jpg", "labels": ["cat"]}}\n{line}\n')
        with pytest.raises(InvalidInput, match="line 2"):
            read_labels(file)


def test_the_draws_of_an_interval_are_always_the_same():
    values = np.random.default_rng(4).random(50)
    first = bootstrap(lambda chosen: values[chosen].mean(), 50)
    assert first == bootstrap(lambda chosen: values[chosen].mean(), 50)
