"""The linear probe: scikit-learn's minimum, CLIP's search of C, and any number of processes like
one.
"""

import warnings

import numpy as np
import pytest
import sklearn.datasets
import torch
from sklearn.linear_model import LogisticRegression as Peer
from sklearn.metrics import balanced_accuracy_score

from mlcd.errors import InvalidInput
from mlcd.keys import split_positions
from mlcd.training.evaluation.linear_probe import NUM_STEPS, coarse_to_fine, grid_c, linear_probe
from mlcd.training.evaluation.logistic_regression import LogisticRegression, PrincipalRows
from mlcd.training.evaluation.scores import score
from mlcd.training.evaluation.splits import LabeledRows, split_samples
from tests.ranks import run_ranks
from tests.unit.training import evaluating

DATA_SETS = ("digits", "wine", "breast_cancer", "iris")


def data_set(name):
    """float64 features and int64 classes; wine and breast cancer standardized, for their units
    differ a thousandfold.
    """
    features, classes = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    if name in ("wine", "breast_cancer"):
        features = (features - features.mean(axis=0)) / features.std(axis=0)
    return features.astype(np.float64), classes.astype(np.int64)


def problem(features, classes):
    return LogisticRegression(
        PrincipalRows(torch.from_numpy(features)), torch.from_numpy(classes), int(classes.max()) + 1
    )


def objective(weight, bias, features, classes, c):
    """scikit-learn's, written out: C times the log-losses, and half the squared norm of the
    weights.
    """
    logits = features @ weight.T + bias
    if logits.shape[1] == 1:
        logits = np.hstack([np.zeros_like(logits), logits])
    own = logits[np.arange(len(classes)), classes]
    return c * (np.logaddexp.reduce(logits, axis=1) - own).sum() + (weight**2).sum() / 2


def peers(features, classes, c):
    """scikit-learn's solution as it is by default (given only C), and by its Newton solver to the
    end.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has not converged
        by_default = Peer(C=c, max_iter=1000).fit(features, classes)
    return by_default, Peer(C=c, max_iter=1000, tol=1e-10, solver="newton-cholesky").fit(
        features, classes
    )


@pytest.mark.parametrize("name", DATA_SETS)
@pytest.mark.parametrize(
    "c",
    [
        1e-6,
        pytest.param(1e-3, marks=pytest.mark.slow),
        1.0,
        pytest.param(316.0, marks=pytest.mark.slow),
        1e5,
    ],
)
def test_the_objective_is_scikit_learns(name, c):
    features, classes = data_set(name)
    ours = problem(features, classes).fit(c)
    by_default, to_the_end = peers(features, classes, c)
    theirs = objective(to_the_end.coef_, to_the_end.intercept_, features, classes, c)
    assert objective(ours.weight.numpy(), ours.bias.numpy(), features, classes, c) == pytest.approx(
        theirs, rel=1e-6
    )
    assert ours.objective == pytest.approx(theirs, rel=1e-6)
    assert ours.objective <= (1 + 1e-6) * objective(
        by_default.coef_, by_default.intercept_, features, classes, c
    )
    assert ours.gap <= 1e-6
    assert (ours.predict(torch.from_numpy(features)).numpy() == to_the_end.predict(features)).all()


def test_it_is_scikit_learns_on_features_of_photographs(shared_data):
    """MobileNetV2's 1,280 features of 16 photographs of as many classes: far more features than
    rows.
    """
    stored = np.load(shared_data / "encoders" / "mobilenet_v2_imagenet" / "reference_features.npz")
    features = stored["features"].astype(np.float64)
    _, classes = np.unique(
        [path.split("/")[0] < "cup" for path in stored["paths"]], return_inverse=True
    )
    for c in (1e-4, 1.0, 100.0):
        ours = problem(features, classes).fit(c)
        peer = Peer(C=c, max_iter=5000, tol=1e-12, solver="newton-cg").fit(features, classes)
        theirs = objective(peer.coef_, peer.intercept_, features, classes, c)
        assert ours.objective == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("name", DATA_SETS)
def test_the_search_finds_the_c_of_the_whole_grid(name):
    """On the split that is taken of these samples; on others a curve may have two peaks."""
    whole = samples(name, None)
    split, rows = split_samples(whole.splits, 0.2), whole.rows.astype(np.float64)
    one = problem(rows[split.train], whole.classes[split.train])
    scores, solution = [], None
    for index in range(NUM_STEPS + 1):
        solution = one.fit(grid_c(index), start=solution)
        predicted = solution.predict(torch.from_numpy(rows[split.validation])).numpy()
        scores.append(score(predicted, whole.classes[split.validation], "accuracy"))
    asked = []
    found = coarse_to_fine(lambda index: asked.append(index) or scores[index])
    assert found == int(np.argmax(scores))  # the first of equals: the smaller C
    assert max(scores) > min(scores) + 0.2
    assert len(asked) == 15
    assert dict(linear_probe(whole, hold_out=0.2, metric="accuracy"))["c"] == grid_c(found)


def test_the_grid_is_clips():
    assert [grid_c(index) for index in (0, 48, 96)] == pytest.approx([1e-6, 1.0, 1e6])
    assert grid_c(9) / grid_c(8) == pytest.approx(10 ** (1 / 8))
    asked = []
    coarse_to_fine(lambda index: asked.append(index) or -abs(index - 37))
    assert asked[:7] == [0, 16, 32, 48, 64, 80, 96]
    assert asked[7:] == [24, 40, 36, 44, 34, 38, 35, 37]


def test_equal_scores_take_the_smaller_c():
    assert coarse_to_fine(lambda _: 0.5) == 0
    assert coarse_to_fine(lambda index: float(21 <= index <= 60)) == 21


def samples(name="digits", num=600):
    features, classes = data_set(name)
    chosen = np.random.default_rng(0).permutation(len(classes))[:num]
    features, classes = features[chosen], classes[chosen]
    names = [str(each) for each in classes]
    keys = [f"{row:04d}.png" for row in range(len(names))]
    return LabeledRows(features.astype(np.float32), keys, split_positions(keys, names), names)


@pytest.mark.parametrize("metric", ["accuracy", "mean-per-class"])
def test_the_tested_model_is_fitted_on_train_and_validation(metric):
    whole = samples()
    measured = dict(linear_probe(whole, hold_out=0.25, metric=metric))
    test = whole.splits <= 0.25
    rows = whole.rows.astype(np.float64)
    peer = Peer(C=measured["c"], solver="newton-cholesky", tol=1e-10).fit(
        rows[~test], whole.classes[~test]
    )
    predicted = peer.predict(rows[test])
    expected = (predicted == whole.classes[test]).mean()
    if metric == "mean-per-class":
        expected = balanced_accuracy_score(whole.classes[test], predicted)
    assert measured[f"linear_probe_{metric.replace('-', '_')}"] == pytest.approx(
        expected, abs=1e-12
    )
    assert measured["train_images"] + measured["validation_images"] == (~test).sum()
    assert measured["validation_images"] == pytest.approx(0.2 * (~test).sum(), abs=5)
    assert measured["test_images"] == test.sum()


def test_more_processes_than_rows_of_a_part(tmp_path):
    few = samples("iris")
    keep = np.concatenate([np.flatnonzero(few.classes == number)[:6] for number in range(2)])
    few = LabeledRows(
        few.rows[keep],
        [few.keys[row] for row in keep],
        split_positions([few.keys[row] for row in keep], [few.class_names[row] for row in keep]),
        [few.class_names[row] for row in keep],
    )
    run_ranks(evaluating.probe, 3, str(tmp_path), few)
    expected = dict(linear_probe(few, hold_out=0.2, metric="accuracy"))
    got = torch.load(tmp_path / "probe-3-2.pt")
    assert expected["validation_images"] == 2
    assert got == pytest.approx({**expected, "objective_gap": got["objective_gap"]}, rel=1e-9)


def broken(change):
    whole = samples(num=100)
    rows, keys, splits, names = (
        whole.rows.copy(),
        list(whole.keys),
        whole.splits.copy(),
        list(whole.class_names),
    )
    change(rows, keys, splits, names)
    return LabeledRows(rows, keys, splits, names)


def one_class(rows, keys, splits, names):
    names[:] = ["cat"] * len(names)


def class_only_tested(rows, keys, splits, names):
    splits[[name == "3" for name in names]] = 0.1


def every_row_a_class(rows, keys, splits, names):
    names[:] = keys


def nothing_to_validate(rows, keys, splits, names):
    splits[splits > 0.2] = 0.9


def not_finite(rows, keys, splits, names):
    rows[7, 3] = np.nan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (one_class, "all 100 images are of one class, cat"),
        (class_only_tested, "but 3 lacks one"),
        (every_row_a_class, "an image to train on for each of 100 classes"),
        (nothing_to_validate, "none falls into the validation part"),
        (not_finite, "the features of 0007.png hold NaN or Inf"),
    ],
)
def test_what_cannot_be_probed_is_refused_in_one_line(change, message):
    with pytest.raises(InvalidInput, match=message) as refusal:
        dict(linear_probe(broken(change), hold_out=0.2, metric="accuracy"))
    assert "\n" not in str(refusal.value)
    assert refusal.value.remedy
