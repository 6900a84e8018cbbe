"""The facts beside a bar stay there until newer ones come."""

import io
import json
import sys

from mlcd.progress import Reporter


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_ends_with_its_last_facts(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    with Reporter().stage("train", 3) as meter:
        meter.advance(0, loss=2.5)
        meter.advance(2)
        meter.advance(1)
    last = terminal.getvalue().splitlines()[-2]
    assert "3/3" in last
    assert "loss=2.5" in last


def test_the_last_line_of_a_stage_holds_its_last_facts(capsys):
    with Reporter("json").stage("train", 2) as meter:
        meter.advance(1, loss=2.5)
        meter.advance(1)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"stage": "train", "done": 2, "total": 2, "loss": 2.5}
