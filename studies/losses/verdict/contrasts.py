"""Named differences between arms: paired tests, Holm's correction and the test of equality."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from studies.losses.instrument.paired import Difference, holm, paired_difference
from studies.losses.verdict.evidence import ByArm

MARGIN: Final = 0.005  # a difference below it is none that matters
CLEAR: Final = 0.05
MIN_SEEDS: Final = 3  # fewer have no interval worth stating


@dataclass(frozen=True)
class Contrast:
    """A named difference, the first arm less the other; arms by their names in the rows."""

    title: str
    arm: str
    other: str


@dataclass(frozen=True)
class Finding:
    """The reading of a contrast in the rows.

    difference: None where there are too few runs. p: after Holm's correction, where there is one.
    seeds: those that both arms have.
    """

    title: str
    difference: Difference | None
    p: float
    seeds: int

    @property
    def missing(self) -> str:
        """Returns why there is no difference."""
        return f"too few seeds ({self.seeds})" if self.seeds else "not run"

    @property
    def verdict(self) -> str:
        """Returns the finding in words. Equality takes two one-sided tests at MARGIN."""
        if self.difference is None:
            return self.missing
        words = []
        if self.p < CLEAR:
            words.append("higher" if self.difference.mean > 0 else "lower")
        if self.difference.p_equal < CLEAR:
            words.append("equal within 0.5" if not words else "by less than 0.5")
        return ", ".join(words) or "not told apart"


def findings(values: ByArm, contrasts: Sequence[Contrast]) -> list[Finding]:
    """Returns each contrast over the seeds that both of its arms have, three or more.

    Their p-values are not corrected: `corrected` does that for all that are tested together.
    """
    return [_finding(values, each) for each in contrasts]


def _finding(values: ByArm, contrast: Contrast) -> Finding:
    ours, theirs = (values.get(name, {}) for name in (contrast.arm, contrast.other))
    seeds = len(ours.keys() & theirs.keys())
    if seeds < MIN_SEEDS:
        return Finding(contrast.title, None, math.nan, seeds)
    difference = paired_difference(ours, theirs, margin=MARGIN)
    return Finding(contrast.title, difference, difference.p, seeds)


def corrected(tables: Mapping[str, Sequence[Finding]]) -> dict[str, list[Finding]]:
    """Returns the findings of several tables with p-values by Holm over all of them.

    What is planned and not run counts as well, so that no p-value rises when it comes.
    """
    asked = [each for found in tables.values() for each in found]
    raised = iter(holm([1.0 if each.difference is None else each.p for each in asked]))
    return {
        title: [replace(each, p=next(raised)) for each in found] for title, found in tables.items()
    }


def points(difference: Difference | None) -> str:
    """Formats a difference in percentage points; bold where zero is outside of the interval."""
    if difference is None:
        return "not run"
    return interval_text(difference.mean, difference.half_width)


def told_apart(finding: Finding) -> str:
    """Formats a finding in percentage points; bold where Holm's p-value is below 5 %."""
    if finding.difference is None:
        return finding.missing
    text = interval_text(finding.difference.mean, finding.difference.half_width).strip("*")
    return f"**{text}**" if finding.p < CLEAR else text


def interval_text(mean: float, half_width: float) -> str:
    text = f"{100 * mean + 0.0:+.2f} ± {100 * half_width:.2f}"
    return f"**{text}**" if abs(mean) > half_width else text


def seeds_text(found: Mapping[str, int] | int, planned: int) -> str:
    """Returns how much is finished, as `12 of 24 seeds`."""
    num = found if isinstance(found, int) else min(found.values(), default=0)
    return f"{num} of {planned} seeds"
