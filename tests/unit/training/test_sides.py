"""Two sides given by hand: folders, embeddings and lists, with the figures of a script in numpy and
scikit-learn.
"""

import csv
import re
import shutil

import numpy as np
import pytest
from PIL import Image, ImageOps

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.pipelines.sync import sync
from mlcd.progress import Reporter
from mlcd.training.evaluation.splits import folder_split
from mlcd.training.evaluation.while_training import check_evaluation
from tests.conftest import call_mlcd, succeed, write_digits
from tests.unit.training import evaluating
from tests.unit.training.running import evaluated


@pytest.fixture(scope="module")
def split_folders(tmp_path_factory):
    """train/ and test/ with one sub-folder per class: photographs where they are at hand, else
    digits in a mirror, which no run of the tests has seen.
    """
    from tests.conftest import SHARED

    root = tmp_path_factory.mktemp("split") / "pictures"
    if (SHARED / "caltech101_20").is_dir():
        with (SHARED / "caltech101_20" / "labels.csv").open() as file:
            places = [
                (SHARED / "caltech101_20" / row["path"], row["split"])
                for row in csv.DictReader(file)
            ]
    else:
        digits = write_digits(tmp_path_factory.mktemp("digits"), 300)
        for path in digits.glob("*/*"):
            ImageOps.mirror(Image.open(path)).save(path)
        places = [
            (path, "test" if n % 4 == 0 else "train")
            for n, path in enumerate(sorted(digits.glob("*/*")))
        ]
    for path, side in places:
        (root / side / path.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / side / path.parent.name)
    return root


@pytest.fixture(scope="module")
def stored(split_folders, tmp_path_factory):
    """Embeddings of both sides, and of the folder that holds them."""
    out = tmp_path_factory.mktemp("stored")
    for name, images in (("train", "train"), ("test", "test"), ("whole", ".")):
        succeed("embed", split_folders / images, out / name, "--model", "pixels")
    return out


def refused(*arguments, contains):
    result = call_mlcd("evaluate", *arguments)
    assert result.returncode == 2, result.stdout
    assert re.search(contains, result.stderr), result.stderr
    assert "Traceback" not in result.stderr


def sides(stored):
    """(rows float64, classes) of both sides: the only thing that the oracles take from
    the project.
    """
    opened = [EmbeddingsArtifact.open(stored / name) for name in ("train", "test")]
    return [(each.load().astype(np.float64), np.array(each.class_names)) for each in opened]


def test_knn_is_that_of_numpy(stored):
    (known, classes), (queries, truth) = sides(stored)
    scores, names = queries @ known.T, np.unique(classes)
    right = 0
    for row, true in zip(scores, truth, strict=True):
        nearest = np.argsort(-row, kind="stable")[:5]
        votes = [np.exp(row[nearest][classes[nearest] == name] / 0.07).sum() for name in names]
        right += names[int(np.argmax(votes))] == true
    record = evaluated("knn", "--train", stored / "train", "--test", stored / "test")
    assert record["metrics"]["knn_accuracy"] == pytest.approx(right / len(truth), abs=1e-6)
    assert record["metrics"]["test_images"] == len(truth)
    assert record["protocol"]["train"] == f"{len(classes)} of train"
    assert record["protocol"]["test"] == f"{len(truth)} of test"
    assert "hold_out" not in record["protocol"]


def test_clusters_of_one_side_are_measured_on_the_other(stored):
    from sklearn.metrics import normalized_mutual_info_score

    from mlcd.clustering.kmeans import kmeans

    (known, classes), (queries, truth) = sides(stored)
    centers = kmeans([known.astype(np.float32)], len(np.unique(classes)), seed=3).centers.astype(
        np.float64
    )
    assigned = (queries @ centers.T).argmax(axis=1)
    purity = sum(
        np.unique(truth[assigned == each], return_counts=True)[1].max()
        for each in np.unique(assigned)
    )
    metrics = evaluated(
        "clusters", "--train", stored / "train", "--test", stored / "test", "--seed", 3
    )["metrics"]
    assert metrics["cluster_purity"] == pytest.approx(purity / len(truth), abs=1e-6)
    assert metrics["cluster_nmi"] == pytest.approx(
        normalized_mutual_info_score(truth, assigned), abs=1e-6
    )


@pytest.mark.parametrize("kind", ["knn", "clusters"])
def test_folders_lists_and_the_whole_folder_give_the_same_figures(
    kind, stored, split_folders, tmp_path
):
    """A folder with train/ and test/ is a split and not twice as many classes."""
    expected = evaluated(kind, "--train", stored / "train", "--test", stored / "test")["metrics"]
    whole = evaluated(kind, stored / "whole")
    lists = [tmp_path / "train.txt", tmp_path / "test.txt"]
    keys = EmbeddingsArtifact.open(stored / "whole").keys
    for side, path in zip(("train", "test"), lists, strict=True):
        path.write_text("\n".join(key for key in keys if key.startswith(f"{side}/")) + "\n")
    listed = evaluated(kind, stored / "whole", "--train", lists[0], "--test", lists[1])
    for record in (whole, listed):
        assert record["metrics"] == pytest.approx(expected, abs=1e-9)
    assert whole["protocol"]["train"].endswith("/train")
    assert whole["protocol"]["classes"] == len(list((split_folders / "train").iterdir()))
    assert (
        listed["protocol"]["test"] == f"{sum(key.startswith('test/') for key in keys)} of test.txt"
    )


def test_a_run_is_measured_on_folders_as_on_their_embeddings(journey, split_folders, tmp_path):
    """The same model, once as a checkpoint and once as the embeddings that its export made."""
    for side in ("train", "test"):
        succeed("embed", split_folders / side, tmp_path / side, "--model", journey / "model")
    folders = ("--train", split_folders / "train", "--test", split_folders / "test")
    run = evaluated("knn", journey / "run", *folders, "--out", tmp_path / "result")
    embedded = evaluated("knn", "--train", tmp_path / "train", "--test", tmp_path / "test")
    assert run["protocol"] == embedded["protocol"]
    assert run["metrics"]["knn_accuracy"] == pytest.approx(
        embedded["metrics"]["knn_accuracy"], abs=0.02
    )  # onnx rounds
    assert run["seen"]["images"] == 0
    assert evaluated("knn", journey / "run", *folders, "--out", tmp_path / "result") == run
    refused(
        "knn", journey / "run", "--out", tmp_path / "result", contains="other input or settings"
    )


def test_sides_that_do_not_go_together_get_one_line(stored, split_folders, journey, tmp_path):
    train, test, run = stored / "train", stored / "test", journey / "run"
    refused("knn", train, "--train", train, contains="require each other")
    refused("knn", contains="give CHECKPOINT")
    refused("knn", "--train", train, "--test", train, contains="are both")
    refused(
        "knn",
        "--train",
        train,
        "--test",
        split_folders / "test",
        contains="got embeddings in .* and images in",
    )
    refused("knn", run, "--train", train, "--test", test, contains="leave out CHECKPOINT")
    refused(
        "knn", "--train", train, "--test", test, "--hold-out", 0.1, contains="leave out --hold-out"
    )
    refused("knn", stored / "whole", "--hold-out", 0.1, contains="already are a split")
    folders = ("--train", split_folders / "train", "--test", split_folders / "test")
    refused("knn", train, *folders, contains="embeddings already determine their images")
    refused("knn", run, "--images", split_folders, *folders, contains="leave out --images")
    refused(
        "knn",
        run,
        "--train",
        split_folders,
        "--test",
        split_folders / "test",
        contains="one side are called train",
    )
    refused(
        "knn",
        "--train",
        train,
        "--test",
        journey / "features",
        contains="must be by the same model",
    )
    (tmp_path / "a.txt").write_text("Motorbikes/absent.jpg\n")
    key = EmbeddingsArtifact.open(train).keys[0]
    (tmp_path / "b.txt").write_text(f"{key}\n")
    (tmp_path / "c.txt").write_text(f"{key}\n{EmbeddingsArtifact.open(train).keys[-1]}\n")
    refused(
        "knn",
        train,
        "--train",
        tmp_path / "b.txt",
        "--test",
        tmp_path / "a.txt",
        contains="has the key",
    )
    refused(
        "knn",
        train,
        "--train",
        tmp_path / "c.txt",
        "--test",
        tmp_path / "b.txt",
        contains="is on both lists",
    )


def test_a_class_that_is_only_tested_on_is_named(stored, split_folders, journey, tmp_path):
    other = tmp_path / "test"
    shutil.copytree(split_folders / "test", other)
    first = min(other.iterdir())
    first.rename(other / "misspelled")
    refused(
        "knn",
        journey / "run",
        "--train",
        split_folders / "train",
        "--test",
        other,
        contains="class misspelled is test",
    )


def test_folders_called_train_val_valid_and_test_are_splits():
    names = ["train/a", "train/b/c", "val/a", "test/b/c", "test/a"]
    split, classes = folder_split(names)
    assert classes == ["a", "b/c", "a", "b/c", "a"]
    assert [mask.tolist() for mask in (split.train, split.validation, split.test)] == [
        [True, True, False, False, False],
        [False, False, True, False, False],
        [False, False, False, True, True],
    ]
    assert split.folders == ("train and val", "test")
    split, _ = folder_split(["train/a", "valid/a"])
    assert (split.test.tolist(), split.folders) == ([False, True], ("train", "valid"))
    for no_split in (
        ["train/a", "train/b"],
        ["train", "bus"],
        ["train", "test", "bus"],
        ["a", "b"],
        ["training/a", "testing/a"],
    ):
        assert folder_split(no_split) is None
    with pytest.raises(
        InvalidInput,
        match="one called train is missing: give the two sides with --train and --test",
    ):
        folder_split(["val/a", "test/a"])
    for beside in ("a", "extra/a", "train"):
        with pytest.raises(
            InvalidInput, match=f"train, test look like splits, but {beside} is beside them"
        ):
            folder_split(["train/a", "test/a", beside])


def test_other_names_of_parts_are_splits_and_parts_without_classes_are_refused(tmp_path):
    split, classes = folder_split(["Train/a", "validation/a", "TEST/a"])
    assert (classes, split.folders) == (["a"] * 3, ("Train and validation", "TEST"))
    assert (split.validation.tolist(), split.test.tolist()) == (
        [False, True, False],
        [False, False, True],
    )
    split, _ = folder_split(["train/a", "dev/a"])
    assert split.test.tolist() == [False, True]
    with pytest.raises(InvalidInput, match="train, test are parts of a data set, but images"):
        folder_split(["train", "test"])
    (tmp_path / "train").mkdir()
    with pytest.raises(
        InvalidInput, match=f"give --train {tmp_path}/train --test {tmp_path}/validation"
    ):
        folder_split(["train/a", "validation/a", "other/a"], str(tmp_path))


def test_a_run_is_not_evaluated_on_what_it_trains_on(digits, split_folders):
    """`evaluation.images` may name the images of the run in other words."""
    leaking = evaluating.run_config(digits, images=str(digits) + "/")
    held_out = leaking.model_copy(
        update={"data": leaking.data.model_copy(update={"hold_out": 0.0})}
    )
    with pytest.raises(ConfigInvalid, match=r"the training images, of which only data\.hold_out=0"):
        check_evaluation(held_out)
    assert check_evaluation(leaking) is not None
    with pytest.raises(ConfigInvalid, match="are splits, and the run is trained on all of them"):
        check_evaluation(evaluating.run_config(split_folders))
    checked = check_evaluation(
        evaluating.run_config(split_folders / "train", images=str(split_folders))
    )
    assert checked.images.own_split is not None


def test_embeddings_at_urls_are_the_same_sides(stored, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for side in ("train", "test"):
        sync(stored / side, f"memory://bucket/{side}", Reporter("silent"))
    here = evaluated("knn", "--train", stored / "train", "--test", stored / "test")
    for train in (stored / "train", "memory://bucket/train"):
        there = evaluated("knn", "--train", train, "--test", "memory://bucket/test")
        assert there["metrics"] == here["metrics"]
    told = "s3:/b/train is neither a path nor a URL: write s3://"
    refused("knn", "--train", "s3:/b/train", "--test", stored / "test", contains=told)
