"""Multinomial logistic regression with an L2 penalty, over rows that are spread over processes.

The objective is scikit-learn's: C times the sum of the log-losses, plus half the squared norm of
the weights. The intercept is free, and two classes share one logit. The objective has one minimum,
and the solver reaches it for any C, by truncated Newton steps (Nocedal and Wright, Numerical
Optimization, algorithm 7.1). CLIP's protocol inherits L-BFGS from scikit-learn, with 1,000
iterations and its tolerance. That stops short of the minimum if C is large: by 5 % of the objective
on scikit-learn's digits at C = 1. The gap depends on the scale of the features.

Shapes: N rows of this process, D features, M logits, E = D + 1 with the intercept last.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from mlcd.world import World

# The gap at which the solver stops, relative to the objective. It is below what the rounding of
# sums  leaves at a million rows.
_TOLERANCE: Final = 1e-9
_MAX_NEWTON: Final = 200
_MAX_CONJUGATE: Final = 500  # products with the Hessian in one Newton step
_MAX_HALVINGS: Final = 40
# A Newton step is solved to this share of its gradient, and better near the minimum.
_FORCING: Final = 0.1
_SUFFICIENT: Final = 1e-4  # Armijo's constant


@dataclass(frozen=True)
class Solution:
    """A solution of the regression.

    weight: float64 [M, D] and bias: float64 [M], like scikit-learn's coef_ and intercept_; M is 1
    for two classes. objective: scikit-learn's. gap: an estimate of its distance to the minimum,
    relative to it.
    """

    weight: Tensor
    bias: Tensor
    c: float
    objective: float
    gap: float

    def predict(self, features: Tensor) -> Tensor:
        """Returns int64 [N] for float64 [N, D]: the class of the largest logit, the lowest of equal
        ones.
        """
        return self.logits(features).argmax(dim=1)

    def logits(self, features: Tensor) -> Tensor:
        """Returns float64 [N, K] for float64 [N, D]; of two classes the first has 0."""
        logits_NM = features @ self.weight.T + self.bias
        return functional.pad(logits_NM, (1, 0)) if len(self.bias) == 1 else logits_NM


@dataclass(frozen=True)
class _Point:
    """One point of the search.

    weights: [M, E], value, gradient: [M, E]. probability: [N, M], that a row belongs to the class.
    """

    weights: Tensor
    value: float
    gradient: Tensor
    probability: Tensor


class PrincipalRows:
    """Features centered and rotated to their principal axes, for any number of problems on them.

    Neither changes a minimum, because the intercept is free and the penalty does not depend on the
    axes. Both make the Hessian nearly diagonal, so that its diagonal is a good preconditioner.
    """

    def __init__(self, features: Tensor, world: World | None = None) -> None:
        """Rotates features, float64 [N, D]: this process's rows, possibly none."""
        self.world = world or World()
        self.num_rows = int(self.world.sum(torch.tensor(len(features), device=features.device)))
        self.mean_D = self.world.sum(features.sum(dim=0)) / self.num_rows
        centered_ND = features - self.mean_D
        self.axes_DD = self._principal_axes(centered_ND)
        self.x_NE = torch.cat([centered_ND @ self.axes_DD, torch.ones_like(features[:, :1])], dim=1)

    def _principal_axes(self, centered_ND: Tensor) -> Tensor:
        moment_DD = self.world.sum(centered_ND.T @ centered_ND) / self.num_rows
        axes_DD = torch.linalg.eigh(moment_DD).eigenvectors
        # Signs and equal eigenvalues leave a choice, so all processes use that of the first one.
        return self.world.sum(axes_DD if self.world.rank == 0 else torch.zeros_like(axes_DD))


class LogisticRegression:
    """One regression problem, which can be solved for any C."""

    def __init__(self, rows: PrincipalRows, classes: Tensor, num_classes: int) -> None:
        """Sets up the problem; classes: int64 [N] in 0..num_classes-1, of this process's rows."""
        self._world, self._num_rows = rows.world, rows.num_rows
        self._mean_D, self._axes_DD, self._x_NE = rows.mean_D, rows.axes_DD, rows.x_NE
        self._classes = classes
        self._num_logits = 1 if num_classes == 2 else num_classes
        self._target_NM = functional.one_hot(classes, num_classes)[:, -self._num_logits :].to(
            self._x_NE.dtype
        )

    def fit(self, c: float, *, start: Solution | None = None) -> Solution:
        """Returns the minimum for this C, to 1e-9 of its value.

        start: a guess, which changes the path and not the result.
        """
        penalty_E = self._x_NE.new_full((self._x_NE.shape[1],), 1 / (c * self._num_rows))
        penalty_E[-1] = 0.0
        point = self._evaluate(self._rotate(start), penalty_E)
        for _ in range(_MAX_NEWTON):
            curvature_ME = self._curvature(point, penalty_E)
            gap = self._gap(point, penalty_E, curvature_ME)
            if gap <= _TOLERANCE:
                break
            lower = self._lower(
                point, self._direction(point, penalty_E, curvature_ME, gap), penalty_E
            )
            # Rounding leaves no lower point.
            if lower is None:
                break
            point = lower
        w_ME = point.weights
        weight_MD = w_ME[:, :-1] @ self._axes_DD.T
        bias_M = w_ME[:, -1] - weight_MD @ self._mean_D
        return Solution(weight_MD, bias_M, c, point.value * c * self._num_rows, gap)

    def _rotate(self, start: Solution | None) -> Tensor:
        if start is None:
            return self._x_NE.new_zeros((self._num_logits, self._x_NE.shape[1]))
        bias_M = start.bias + start.weight @ self._mean_D
        return torch.cat([start.weight @ self._axes_DD, bias_M[:, None]], dim=1)

    def _evaluate(self, w_ME: Tensor, penalty_E: Tensor) -> _Point:
        """Returns the objective divided by C and the number of rows, and its gradient."""
        log_NK = functional.log_softmax(self._logits(w_ME), dim=1)
        losses = -log_NK.gather(1, self._classes[:, None]).sum()
        probability_NM = log_NK[:, -self._num_logits :].exp()
        gradient_ME = (probability_NM - self._target_NM).T @ self._x_NE
        total = self._world.sum(torch.cat([losses[None], gradient_ME.flatten()])) / self._num_rows
        value = total[0] + (penalty_E * w_ME.square()).sum() / 2
        return _Point(
            w_ME, float(value), total[1:].view_as(w_ME) + penalty_E * w_ME, probability_NM
        )

    def _logits(self, w_ME: Tensor) -> Tensor:
        logits_NM = self._x_NE @ w_ME.T
        return functional.pad(logits_NM, (1, 0)) if self._num_logits == 1 else logits_NM

    def _curvature(self, point: _Point, penalty_E: Tensor) -> Tensor:
        """Returns the diagonal of the Hessian, [M, E]."""
        spread_NM = point.probability * (1 - point.probability)
        diagonal_ME = (
            self._world.sum(spread_NM.T @ self._x_NE.square()) / self._num_rows + penalty_E
        )
        return diagonal_ME.clamp_min(torch.finfo(diagonal_ME.dtype).tiny)

    def _gap(self, point: _Point, penalty_E: Tensor, curvature_ME: Tensor) -> float:
        """Estimates the distance to the minimum from the gradient, relative to the value.

        |g|^2 / 2m bounds it for the weights, because the penalty alone makes the curvature at least
        m. The intercept's curvature is not bounded, so its own value is used.
        """
        weights = point.gradient[:, :-1].square().sum() / penalty_E[0]
        intercept = (point.gradient[:, -1].square() / curvature_ME[:, -1]).sum()
        return float(weights + intercept) / (2 * point.value)

    def _hessian_product(self, point: _Point, penalty_E: Tensor, v_ME: Tensor) -> Tensor:
        change_NM = point.probability * (self._x_NE @ v_ME.T)
        # d p = p (u - p.u) for softmax, and p (1 - p) u for the one logit of two classes.
        change_NM = change_NM - point.probability * change_NM.sum(dim=1, keepdim=True)
        return self._world.sum(change_NM.T @ self._x_NE) / self._num_rows + penalty_E * v_ME

    def _direction(
        self, point: _Point, penalty_E: Tensor, curvature_ME: Tensor, gap: float
    ) -> Tensor:
        """Returns the Newton step, by conjugate gradients preconditioned with the diagonal.

        It is the more exact, the nearer the point is to the minimum.
        """
        x_ME = torch.zeros_like(point.gradient)
        residual = -point.gradient
        ahead = residual / curvature_ME
        power = float((residual * ahead).sum())
        enough = power * min(_FORCING, gap**0.5) ** 2
        for _ in range(_MAX_CONJUGATE):
            product = self._hessian_product(point, penalty_E, ahead)
            bend = float((ahead * product).sum())
            if power <= enough or bend <= 0:
                break
            x_ME = x_ME + power / bend * ahead
            residual = residual - power / bend * product
            scaled = residual / curvature_ME
            before, power = power, float((residual * scaled).sum())
            ahead = scaled + power / before * ahead
        return x_ME

    def _lower(self, point: _Point, direction_ME: Tensor, penalty_E: Tensor) -> _Point | None:
        """Returns the first point at 1, 1/2, 1/4, ... of the direction whose value is low enough,
        or None.
        """
        slope = float((point.gradient * direction_ME).sum())
        step = 1.0
        for _ in range(_MAX_HALVINGS):
            reached = self._evaluate(point.weights + step * direction_ME, penalty_E)
            if reached.value <= point.value + _SUFFICIENT * step * slope:
                return reached
            step /= 2
        return None
