"""Runs in this process: their configs, struck at a step, what they have logged, and figures."""

import json

from mlcd.progress import Reporter
from mlcd.training.config import RunConfig, load_config
from tests.conftest import succeed

SILENT = Reporter("silent")

# Two global views and a local one, with every change of color.
VIEWS = (
    "augment.views=2",
    "augment.local_views=1",
    "augment.local_size=8",
    "augment.brightness=0.4",
    "augment.contrast=0.4",
    "augment.saturation=0.2",
    "augment.hue=0.1",
    "augment.grayscale=0.2",
    "augment.blur=[1.0, 0.1, 0.5]",
    "augment.solarize=[0, 0.2, 0]",
)


def configured(recipe, images, labels, out, *overrides) -> RunConfig:
    places = [f"data.images={images}", f"data.labels={labels}", f"out={out}"]
    return load_config(str(recipe), [*places, *overrides])


def evaluated(*arguments):
    """The one record of `mlcd evaluate`."""
    result = succeed("evaluate", *arguments, "--json")
    (record,) = json.loads(result.stdout.splitlines()[-1])["results"]
    return record


def read_log(run):
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def before_step(monkeypatch, number, strike):
    """Call `strike(state)` when step `number` begins; returns the list of steps begun."""
    from mlcd.training.run import classification

    original, begun = classification.train_step, []

    def step(state, *rest):
        begun.append(state.step)
        if state.step == number:
            strike(state)
        return original(state, *rest)

    monkeypatch.setattr(classification, "train_step", step)
    return begun


def saved_bytes(run, step):
    folder = run.path / "checkpoints" / f"step_{step:06d}"
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "manifest.json"  # tells the time
    }
