"""The named hypotheses of each experiment: Holm's correction covers all of its teachers, those
that are not run too.
"""

import math
from collections.abc import Sequence
from typing import Final

from studies.losses.frozen.tier import FROZEN
from studies.losses.verdict.all_rows import AllRows
from studies.losses.verdict.contrasts import Finding, corrected, findings
from studies.losses.verdict.evidence import Row, by_arm
from studies.losses.verdict.resting import at_rest

AT_ONE_COSINE: Final = "MLCD - MLC where both rest at MLC's cosine"


def tested(every: AllRows, measure: str) -> dict[str, list[Finding]]:
    """Returns the findings of each source that has rows, by its title."""
    experiments: dict[str, dict[str, list[Finding]]] = {}
    has_rows = set()
    for title, rows, contrasts in every.sources:
        if rows:
            has_rows.add(title)
        experiment = title.partition(",")[0]
        found = findings(by_arm(rows, measure), contrasts)
        if experiment == FROZEN:
            found.append(_at_one_cosine(rows, measure))
        experiments.setdefault(experiment, {})[title] = found
    return {
        title: found
        for tables in experiments.values()
        for title, found in corrected(tables).items()
        if title in has_rows
    }


def _at_one_cosine(rows: Sequence[Row], measure: str) -> Finding:
    found = at_rest(rows, measure)
    if found is None:
        return Finding(AT_ONE_COSINE, None, math.nan, 0)
    return Finding(AT_ONE_COSINE, found.difference, found.difference.p, found.seeds)
