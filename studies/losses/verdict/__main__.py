"""Says what the committed rows of the quick tiers say, and fills the page with it.

    python -m studies.losses.verdict [--results DIR] [--write] [--docs DIR]

Without --write every table is printed. With it those of docs/explanation/validation.md are written
between its marks, and its picture is drawn. Nothing is run and nothing is typed by hand; what is
not finished says so. The headline is the mean of four sets of
unseen classes, all images asked. Differences are in percentage points with 95 % intervals of paired
t-tests over seeds; p-values are Holm's over all named differences of an experiment, its teachers
together; equality is claimed where both one-sided tests at ± 0.5 points pass.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from studies.losses.frozen.features import TEACHERS
from studies.losses.marked import filled
from studies.losses.table import RESULTS
from studies.losses.verdict import headlines, mosaic_tables, rate_tables, tables, tower_tables
from studies.losses.verdict.all_rows import TITLES, AllRows
from studies.losses.verdict.evidence import where
from studies.losses.verdict.resting_picture import draw_resting

_DOCS: Final = Path(__file__).resolve().parents[3] / "docs"
_MARK: Final = "study"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write", action="store_true", help="fill the page, draw the picture")
    parser.add_argument("--docs", type=Path, default=_DOCS)
    options = parser.parse_args()
    every = AllRows.read(options.results)
    blocks = blocks_of(every)
    if not options.write:
        for name, block in blocks.items():
            print(f"## {name}\n\n{block()}\n")
        return
    page = options.docs / "explanation" / "validation.md"
    page.write_text(filled(page.read_text(), blocks, _MARK))
    by_teacher = {TITLES[teacher]: where(every.frozen, teacher=teacher) for teacher in TEACHERS}
    draw_resting(by_teacher, options.docs / "assets" / "validation-resting.svg")


def blocks_of(every: AllRows) -> Mapping[str, Callable[[], str]]:
    """Returns the makers of all blocks by name."""
    return {
        "headline": lambda: headlines.headline(every),
        "answer": lambda: headlines.answer(every),
        "claims": lambda: headlines.claims(every),
        "progress": lambda: headlines.progress(every),
        "hypotheses": lambda: tables.hypotheses(every),
        "sets": lambda: tables.sets(every),
        "images": lambda: tables.image_intervals(every),
        "resting": lambda: tables.resting(every),
        "surface": lambda: tables.surfaces(every),
        "starts": lambda: tables.starts(every),
        "sweeps": lambda: tables.sweep_tables(every),
        "rates": lambda: rate_tables.other_rates(every),
        "towers": lambda: tower_tables.tower_arms(every),
        "mosaics": lambda: mosaic_tables.mosaics(every),
        "covariates": lambda: mosaic_tables.covariates(every),
        "learned": lambda: tables.learned(every),
        "pairs": lambda: tables.pairs(every),
        "facts": lambda: tables.facts(every),
    }


if __name__ == "__main__":
    main()
