"""The reading of the scales tier: learned scalars against fixed ones, and pairs by batch size."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from studies.losses.scales.arms import (
    BATCHES,
    NAMED_LEARNED,
    LearnedArm,
    PairArm,
    learned_arms,
)
from studies.losses.verdict.contrasts import (
    Contrast,
    Finding,
    corrected,
    findings,
    points,
    told_apart,
)
from studies.losses.verdict.evidence import UNSEEN, Row, by_arm, mean_of, where

LEARNED_CONTRASTS: Final = tuple(
    Contrast(f"{name} - fixed", arm.name, NAMED_LEARNED["fixed"].name)
    for name, arm in NAMED_LEARNED.items()
    if name != "fixed"
)
PAIR_CONTRASTS: Final = tuple(
    Contrast(f"B = {batch:,}", PairArm("siglip", batch).name, PairArm("clip", batch).name)
    for batch in BATCHES
)
_CURVE: Final = "gradient_norms"


def pair_findings(rows: Sequence[Row]) -> list[Finding]:
    """Returns SigLIP's loss less CLIP's at every batch size, by retrieval."""
    found = findings(by_arm(rows, "retrieval"), PAIR_CONTRASTS)
    return corrected({"pairs": found})["pairs"]


def pair_lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yields the lines of a table over batch sizes: accuracies, differences, gradient norms."""
    yield ["pairs in a step", "CLIP, %", "SigLIP, %", "SigLIP - CLIP", "says",
           "norm of CLIP's gradient, begin · end", "of SigLIP's"]  # fmt: skip
    for batch, finding in zip(BATCHES, pair_findings(rows), strict=True):
        own = [where(rows, arm=PairArm(kind, batch).name) for kind in ("clip", "siglip")]
        accuracies = [f"{100 * mean_of(each, 'retrieval'):.1f}" if each else "" for each in own]
        norms = [_begin_and_end(each) for each in own]
        yield [
            f"{batch:,}", *accuracies, told_apart(finding), finding.verdict, *norms,
        ]  # fmt: skip


def _begin_and_end(rows: Sequence[Row]) -> str:
    """Returns the mean norm over the first and the last tenth of the steps."""
    if not rows:
        return ""
    curve = np.mean([row[_CURVE] for row in rows], axis=0)
    tenth = max(1, len(curve) // 10)
    return f"{curve[:tenth].mean():.2f} · {curve[-tenth:].mean():.2f}"


def learned_lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yields the lines of a table over k and the first s: what learning adds to fixed scalars."""
    starts = ("both from -log(r k)", "both from -log(r k / l)", "both from 0")
    end = "s and b at the end, from -log(r k)"
    apart = ("b alone from -log(r k)", "fixed b = -log(r k / l)")
    yield ["k", "first s", "fixed, %", *starts, *apart, end]
    values = by_arm(rows, UNSEEN)
    groups: dict[tuple[int, float], list[LearnedArm]] = {}
    for arm in learned_arms():
        groups.setdefault((arm.clusters, arm.scale), []).append(arm)
    for (clusters, scale), (fixed, *others) in groups.items():
        contrasts = [Contrast(arm.name, arm.name, fixed.name) for arm in others]
        found = [points(each.difference) for each in findings(values, contrasts)]
        own = where(rows, arm=fixed.name)
        accuracy = f"{100 * mean_of(own, UNSEEN):.2f}" if own else ""
        yield [
            f"{clusters:,}",
            f"{scale:g}",
            accuracy,
            *found,
            _end(where(rows, arm=others[0].name)),
        ]


def _end(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    scale = float(np.exp(mean_of(rows, "end_log_scale")))
    return f"{scale:.1f}, {mean_of(rows, 'end_bias'):+.2f}"
