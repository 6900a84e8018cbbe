"""Fine-tuning beside the probe: the same images on both sides, all of the tower, kept results."""

import json
import shutil

from mlcd.models.runs import find_checkpoint
from mlcd.models.servable import Servable
from mlcd.training.evaluation.stored_results import read_stored_results
from tests.conftest import refuse, succeed

SHORT = ("schedule.steps=12", "schedule.batch_size=16", "optim.warmup_steps=2", "optim.ema=null")


def test_a_tower_is_fine_tuned_beside_its_probe_on_the_same_split(journey, digits, tmp_path):
    out, model, images = tmp_path / "out", journey / "model", tmp_path / "images"
    for digit in "01":
        shutil.copytree(digits / digit, images / digit)
    command = ("evaluate", "fine-tune", model, "--images", images, "--out", out, *SHORT)
    told = succeed(*command, "--json")
    probe, tuned = json.loads(told.stdout.splitlines()[-1])["results"]
    assert probe["protocol"]["split"] == tuned["protocol"]["split"]
    assert (tuned["protocol"]["steps"], tuned["protocol"]["kind"]) == (12, "fine-tune")
    low, high = tuned["intervals"]["fine_tune_accuracy"]
    accuracy = tuned["metrics"]["fine_tune_accuracy"]
    assert low <= accuracy <= high
    assert accuracy > 0.5
    assert tuned["seen"]["images"] == 0  # neither here nor in the making of the tower
    succeed("evaluate", "compare", out / "linear-probe", out / "fine-tune")
    assert read_stored_results(out / "fine-tune").right.mean() == accuracy
    before, after = (
        Servable.read(folder).trunk.state_dict()
        for folder in (model, find_checkpoint(out / "run") / "weights")
    )
    unmoved = [name for name in before if before[name].equal(after[name])]
    assert unmoved == []
    trained = json.loads((out / "run" / "manifest.json").read_text())["summary"]
    assert trained["samples"] + int(tuned["metrics"]["test_images"]) == probe["protocol"]["images"]
    made = (out / "run" / "manifest.json").stat().st_mtime_ns
    succeed(*command, "--json")
    assert (out / "run" / "manifest.json").stat().st_mtime_ns == made


def test_a_split_of_folds_and_a_split_with_a_share_are_refused(journey, digits, tmp_path):
    split = tmp_path / "split.json"
    split.write_text(json.dumps({"folds": [["a"], ["b"]], "test": ["c"]}))
    places = ("--images", digits, "--out", tmp_path / "out", "--split", split)
    command = ("evaluate", "fine-tune", journey / "model", *places)
    for options, refusal in (
        ((), "requires a split with one fold, got 2"),
        (("--hold-out", 0.5), "leave out --hold-out"),
    ):
        refuse(*command, *options, contains=refusal)
