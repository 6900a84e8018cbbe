"""The published figures are what the committed rows give."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from studies import continuing
from studies.losses.marked import filled
from studies.losses.table import RESULTS
from studies.losses.verdict.__main__ import blocks_of
from studies.losses.verdict.all_rows import AllRows

PAGES = Path(__file__).resolve().parents[3] / "docs" / "explanation"
TABLES = "01f8e3704eb3d3b4dabe68f90666aacb9fc5630d067516cba28fcb51d88b75f3"
"""The SHA-256 of all tables, most of which no page shows; another one is another answer."""


@pytest.fixture(scope="module")
def blocks():
    return blocks_of(AllRows.read(RESULTS))


def test_the_page_of_the_study_is_made_of_the_rows(blocks):
    page = (PAGES / "validation.md").read_text()
    assert page.count("<!-- study: ") == 4
    assert filled(page, blocks, "study") == page
    with pytest.raises(KeyError):
        filled("<!-- study: other -->\n<!-- /study -->", blocks, "study")


def test_every_table_is_what_it_was(blocks):
    tables = "\n\n".join(f"## {name}\n\n{block()}" for name, block in blocks.items())
    assert sha256(tables.encode()).hexdigest() == TABLES, tables


def test_the_study_of_training_on_has_the_differences_of_its_figures():
    stored = json.loads(continuing.RESULTS.read_text())
    figures = {int(seed): runs for seed, runs in stored["figures"].items()}
    assert continuing.summary(figures) == stored["differences"]
    page = (PAGES / "training.md").read_text()
    shown = [each["points"] in page for each in stored["differences"].values()]
    assert sum(shown) >= 10
