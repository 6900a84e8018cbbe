"""Fits bridges on pivots: images whose rows are known in both spaces.

Both spaces are centered, because the rows of a tower lie in a cone around their mean, and texts lie
in a different cone than images. The output of a bridge is orthogonal to the mean of the target's
rows, so that a text similar to everything is close to nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import InvalidInput
from mlcd.export.bridges import Bridge, Linear, Mixture, Rows
from mlcd.keys import HELD_OUT_FRACTION
from mlcd.types import Embeddings

BridgeKind: TypeAlias = Literal["mixture", "ridge"]
MIN_PIVOTS: Final = 50
# the penalties of ridge, relative to the mean squared length of the columns
_PENALTIES: Final = (1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, 3.0)
_TEMPERATURES: Final = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2)
_SCALES: Final = np.exp(np.linspace(0, 6, 121))
_RECALLS: Final = (1, 5, 10)


@dataclass(frozen=True)
class Pivots:
    """The embeddings of images in two spaces.

    source: unit rows of the model with a text tower, [N, F]. target: unit rows of the model that
    gets the bridge, [N, D]. positions: [N] in (0, 1); they decide which images are held out.
    class_of: [N], class index of each image, -1 without class. names: unit rows of the class names
    by the source's text tower, [C, F]. text_mean: [F], mean row of general texts.
    """

    source: Rows
    target: Rows
    positions: NDArray[np.float64]
    class_of: NDArray[np.int64]
    names: Rows
    text_mean: Rows

    def part(self, low: float, high: float) -> "Pivots":
        """Returns the images at positions in (low, high]."""
        in_part = (self.positions > low) & (self.positions <= high)
        return Pivots(
            self.source[in_part],
            self.target[in_part],
            self.positions[in_part],
            self.class_of[in_part],
            self.names,
            self.text_mean,
        )

    @property
    def has_names(self) -> bool:
        return len(self.names) > 1 and bool((self.class_of >= 0).all())

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class FittedBridge:
    """A bridge for texts, and its measurements on held-out images.

    scale: factor with which softmax(scale * cosine) over the names has the lowest cross-entropy.
    """

    bridge: Bridge
    scale: float
    facts: dict[str, Any]


def fit_bridge(kind: BridgeKind, pivots: Pivots) -> FittedBridge:
    """Fits on three fifths of the pivots, chooses strength and scale on a fourth, fits again on
    those four fifths, and measures on the last.

    Chooses by zero-shot accuracy on the names if every image has a class, otherwise by image
    retrieval. Raises InvalidInput for fewer than MIN_PIVOTS distinct pivots.
    """
    num = min(_count_distinct(pivots.source), _count_distinct(pivots.target))
    if num < MIN_PIVOTS:
        raise InvalidInput(
            f"a bridge needs at least {MIN_PIVOTS} distinct usable images, got {num}",
            remedy="give more with --images",
        )
    validation = pivots.part(HELD_OUT_FRACTION, 2 * HELD_OUT_FRACTION)
    fit: Callable[[Pivots, float], _Fit] = _fit_linear if kind == "ridge" else _fit_mixture
    strengths = _PENALTIES if kind == "ridge" else _TEMPERATURES
    candidates = [fit(pivots.part(2 * HELD_OUT_FRACTION, 1), strength) for strength in strengths]
    scores = [_score(candidate, validation) for candidate in candidates]
    best = int(np.argmax(scores))
    scale = _find_best_scale(*_score_answers(candidates[best], validation))
    final = fit(pivots.part(HELD_OUT_FRACTION, 1), strengths[best])
    held_out = pivots.part(0, HELD_OUT_FRACTION)
    facts = {
        "bridge": kind,
        "bridge_strength": strengths[best],
        "bridge_chosen_by": "names" if pivots.has_names else "images",
        "bridge_pivots": len(pivots) - len(held_out),
        **_measure(final, held_out),
    }
    return FittedBridge(final.for_texts, scale, facts)


def _count_distinct(rows: Rows) -> int:
    return len({row.tobytes() for row in rows})


@dataclass(frozen=True)
class _Fit:
    """One bridge in two forms: images and texts of the source have different means."""

    for_images: Bridge
    for_texts: Bridge


def _fit_linear(pivots: Pivots, penalty: float) -> _Fit:
    mean = pivots.source.mean(axis=0)
    matrix = ridge(_unit(pivots.source - mean), _remove_mean(pivots.target), penalty)
    return _Fit(Linear(matrix, mean), Linear(matrix, pivots.text_mean))


def _fit_mixture(pivots: Pivots, temperature: float) -> _Fit:
    mean = pivots.source.mean(axis=0)
    keys, values = _unit(pivots.source - mean), _remove_mean(pivots.target)
    return _Fit(
        Mixture(keys, values, temperature, mean=mean),
        Mixture(keys, values, temperature, mean=pivots.text_mean),
    )


def ridge(inputs: Rows, outputs: Rows, penalty: float) -> NDArray[np.float64]:
    """Returns the matrix M that minimizes |inputs M - outputs|^2 + penalty * c * |M|^2, in float64.

    c: the mean squared length of the columns of `inputs`.
    """
    x: NDArray[np.float64] = inputs.astype(np.float64)
    gram: NDArray[np.float64] = x.T @ x
    gram[np.diag_indices_from(gram)] += penalty * np.trace(gram) / len(gram)
    return np.linalg.solve(gram, x.T @ outputs.astype(np.float64)).astype(np.float64)


def _remove_mean(rows: Rows) -> NDArray[np.float64]:
    """Subtracts the mean of the rows, projects out its direction, and normalizes the result."""
    rows = rows.astype(np.float64)
    mean = rows.mean(axis=0)
    direction = mean / max(float(np.linalg.norm(mean)), 1e-12)
    centered = rows - mean
    return _unit(centered - np.outer(centered @ direction, direction))


def _unit(rows: Rows) -> NDArray[np.float64]:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: NDArray[np.float64] = rows.astype(np.float64) / np.maximum(lengths, 1e-12)
    return unit


def _score_answers(fit: _Fit, part: Pivots) -> tuple[Rows, NDArray[np.int64]]:
    """Returns the cosine of each image with every answer, [N, answers], and the index of the right
    answer, [N]. The answers are the names, or without names the bridged images themselves.
    """
    if part.has_names:
        return part.target @ fit.for_texts.apply(part.names).T, part.class_of
    return part.target @ fit.for_images.apply(part.source).T, np.arange(len(part))


def _score(fit: _Fit, part: Pivots) -> float:
    scores, right = _score_answers(fit, part)
    # the loss at the best scale breaks ties of the accuracy
    accuracy = float((scores.argmax(axis=1) == right).mean())
    return accuracy - 1e-3 * _loss(scores, right, _find_best_scale(scores, right))


def _find_best_scale(scores: Rows, right: NDArray[np.int64]) -> float:
    return float(min(_SCALES, key=lambda scale: _loss(scores, right, scale)))


def _loss(scores: Rows, right: NDArray[np.int64], scale: float) -> float:
    scaled = scale * scores.astype(np.float64)
    scaled -= scaled.max(axis=1, keepdims=True)
    right_logits = scaled[np.arange(len(right)), right]
    return float((np.log(np.exp(scaled).sum(axis=1)) - right_logits).mean())


def _measure(fit: _Fit, held_out: Pivots) -> dict[str, Any]:
    bridged: Embeddings = fit.for_images.apply(held_out.source)
    scores = bridged @ held_out.target.T
    num_better = (scores > np.diag(scores)[:, None]).sum(axis=1)
    facts: dict[str, Any] = {"bridge_held_out": len(held_out)}
    for rank in _RECALLS:
        facts[f"bridge_recall_at_{rank}"] = round(float((num_better < rank).mean()), 4)
    if held_out.has_names:
        name_scores, right = _score_answers(fit, held_out)
        facts["bridge_classes"] = len(held_out.names)
        facts["bridge_zero_shot"] = round(float((name_scores.argmax(axis=1) == right).mean()), 4)
    return facts
