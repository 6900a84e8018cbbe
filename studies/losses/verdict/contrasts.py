"""Named differences between arms: the pooled model, Holm's correction and the test of equality."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from studies.losses.instrument.pooled import Difference, Pooled, holm
from studies.losses.verdict.evidence import ByArm

MARGIN: Final = 0.005  # a difference below it is none that matters
CLEAR: Final = 0.05
_MIN_SEEDS: Final = 3  # fewer have no interval worth stating


@dataclass(frozen=True)
class Contrast:
    """A named difference, the first arm less the other; arms by their names in the rows."""

    title: str
    arm: str
    other: str


@dataclass(frozen=True)
class Finding:
    """The reading of a contrast in the rows.

    difference: None where there are too few runs. p: after Holm's correction. seeds: those that
    both arms have.
    """

    contrast: Contrast
    difference: Difference | None
    p: float
    seeds: int

    @property
    def verdict(self) -> str:
        """Returns the finding in words. Equality takes two one-sided tests at MARGIN."""
        if self.difference is None:
            return "not run"
        words = []
        if self.p < CLEAR:
            words.append("higher" if self.difference.mean > 0 else "lower")
        if self.difference.p_equal < CLEAR:
            words.append("equal within 0.5" if not words else "by less than 0.5")
        return ", ".join(words) or "not told apart"


def findings(values: ByArm, contrasts: Sequence[Contrast]) -> list[Finding]:
    """Returns each contrast by one residual of all arms of the family that have been run.

    A contrast needs three seeds that both of its arms have.
    """
    named = dict.fromkeys(name for each in contrasts for name in (each.arm, each.other))
    seeds = [
        len(values.get(each.arm, {}).keys() & values.get(each.other, {})) for each in contrasts
    ]
    run = [num >= _MIN_SEEDS for num in seeds]
    if not any(run):
        return [
            Finding(each, None, math.nan, num) for each, num in zip(contrasts, seeds, strict=True)
        ]
    pooled = Pooled.of({name: values[name] for name in named if name in values})
    found = [
        pooled.difference(each.arm, each.other, margin=MARGIN) if enough else None
        for each, enough in zip(contrasts, run, strict=True)
    ]
    raised = iter(holm([each.p for each in found if each is not None]))
    return [
        Finding(contrast, each, math.nan if each is None else next(raised), num)
        for contrast, each, num in zip(contrasts, found, seeds, strict=True)
    ]


def points(difference: Difference | None) -> str:
    """Formats a difference in percentage points; bold where zero is outside of the interval."""
    if difference is None:
        return "not run"
    return interval_text(difference.mean, difference.half_width)


def interval_text(mean: float, half_width: float) -> str:
    text = f"{100 * mean + 0.0:+.2f} ± {100 * half_width:.2f}"
    return f"**{text}**" if abs(mean) > half_width else text


def seeds_text(found: Mapping[str, int] | int, planned: int) -> str:
    """Returns how much is finished, as `12 of 24 seeds`."""
    num = found if isinstance(found, int) else min(found.values(), default=0)
    return f"{num} of {planned} seeds"
