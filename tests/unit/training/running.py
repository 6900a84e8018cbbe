"""Runs in this process: without a word, struck at a step, and what they have logged."""

import json

from mlcd.progress import Reporter

SILENT = Reporter("silent")


def read_log(run):
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def before_step(monkeypatch, number, strike):
    """Call `strike(state)` when step `number` begins; returns the list of steps begun."""
    from training import loop

    original, begun = loop.train_step, []

    def step(state, *rest):
        begun.append(state.step)
        if state.step == number:
            strike(state)
        return original(state, *rest)

    monkeypatch.setattr(loop, "train_step", step)
    return begun
