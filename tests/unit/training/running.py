"""Runs in this process: without a word, struck at a step, and what they have logged."""

import json

from mlcd.progress import Reporter

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


def read_log(run):
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def before_step(monkeypatch, number, strike):
    """Call `strike(state)` when step `number` begins; returns the list of steps begun."""
    from training.run import classification

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
