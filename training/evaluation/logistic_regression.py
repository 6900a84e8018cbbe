"""Multinomial logistic regression with an L2 penalty, on rows that are sharded over processes.

The objective is scikit-learn's: C times the sum of the log-losses, plus half the squared norm of
the weights. The intercept is not penalized, and two classes share one logit. The objective has one
minimum, and the solver reaches it for any C, by truncated Newton steps (Nocedal and Wright,
Numerical Optimization, algorithm 7.1). CLIP's protocol uses scikit-learn's L-BFGS with 1,000
iterations and the default tolerance, which stops before the minimum if C is large: 5 % above the
minimum on scikit-learn's digits at C = 1. That gap depends on the scale of the features.

Shapes: N rows of this process, D features, M logits, E = D + 1 with the intercept last.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from mlcd.world import World

# The gap at which the solver stops, relative to the objective: below the rounding error of a sum of
# a million rows.
_TOLERANCE: Final = 1e-9
_MAX_NEWTON: Final = 200
_MAX_CONJUGATE: Final = 500  # products with the Hessian in one Newton step
_MAX_HALVINGS: Final = 40
# A Newton step's residual is at most this share of its gradient, and smaller near the minimum.
_FORCING: Final = 0.1
_SUFFICIENT: Final = 1e-4  # Armijo's constant


@dataclass(frozen=True)
class Solution:
    """A solution of the regression.

    weight: float64 [M, D] and bias: float64 [M], like scikit-learn's coef_ and intercept_; M is 1
    for two classes. objective: scikit-learn's. gap: estimated distance of the objective to its
    minimum, relative to the objective.
    """

    weight: Tensor
    bias: Tensor
    c: float
    objective: float
    gap: float

    def predict(self, features: Tensor) -> Tensor:
        """Returns classes int64 [N] of features float64 [N, D]; ties go to the lowest class."""
        return self.logits(features).argmax(dim=1)

    def logits(self, features: Tensor) -> Tensor:
        """Returns logits [N, K] of features [N, D]; with two classes the first has logit 0."""
        logits_NM = features @ self.weight.T + self.bias
        return functional.pad(logits_NM, (1, 0)) if len(self.bias) == 1 else logits_NM


@dataclass(frozen=True)
class _Point:
    """A point of the search.

    weights, gradient: [M, E]. value: objective divided by C and the number of rows. probability:
    [N, M], of the classes for each row.
    """

    weights: Tensor
    value: float
    gradient: Tensor
    probability: Tensor


class PrincipalRows:
    """Features centered and rotated to their principal axes, shared by any number of problems.

    Centering and rotation do not change the minimum, because the intercept is not penalized and the
    penalty does not depend on the axes. They make the Hessian nearly diagonal, so that its diagonal
    is a good preconditioner.
    """

    def __init__(self, features: Tensor, world: World | None = None) -> None:
        """Rotates this process's features, float64 [N, D]; N may be 0."""
        self.world = world or World()
        self.num_rows = int(self.world.sum(torch.tensor(len(features), device=features.device)))
        self.mean_D = self.world.sum(features.sum(dim=0)) / self.num_rows
        centered_ND = features - self.mean_D
        self.axes_DD = self._principal_axes(centered_ND)
        self.x_NE = torch.cat([centered_ND @ self.axes_DD, torch.ones_like(features[:, :1])], dim=1)

    def _principal_axes(self, centered_ND: Tensor) -> Tensor:
        moment_DD = self.world.sum(centered_ND.T @ centered_ND) / self.num_rows
        axes_DD = torch.linalg.eigh(moment_DD).eigenvectors
        # Eigenvectors are not unique, so all processes use those of process 0.
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
        """Returns the minimum for this C, to 1e-9 of the objective.

        start: initial guess; changes the number of steps, not the result.
        """
        penalty_E = self._x_NE.new_full((self._x_NE.shape[1],), 1 / (c * self._num_rows))
        penalty_E[-1] = 0.0
        point = self._evaluate(self._rotate(start), penalty_E)
        for _ in range(_MAX_NEWTON):
            curvature_ME = self._curvature(point, penalty_E)
            gap = self._gap(point, penalty_E, curvature_ME)
            if gap <= _TOLERANCE:
                break
            lower_point = self._search_line(
                point, self._newton_step(point, penalty_E, curvature_ME, gap), penalty_E
            )
            # Within rounding, no point is lower.
            if lower_point is None:
                break
            point = lower_point
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
        """Returns the point with its value (objective / (C N)) and gradient."""
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
        """Estimates the distance of the value to the minimum, relative to the value.

        |g|^2 / 2m bounds the distance for the weights, because the penalty makes their curvature at
        least m. The intercept's curvature lacks a bound, so its actual value is used.
        """
        weights = point.gradient[:, :-1].square().sum() / penalty_E[0]
        intercept = (point.gradient[:, -1].square() / curvature_ME[:, -1]).sum()
        return float(weights + intercept) / (2 * point.value)

    def _hessian_product(self, point: _Point, penalty_E: Tensor, v_ME: Tensor) -> Tensor:
        change_NM = point.probability * (self._x_NE @ v_ME.T)
        # d p = p (u - p.u) for softmax, and p (1 - p) u for the single logit of two classes.
        change_NM = change_NM - point.probability * change_NM.sum(dim=1, keepdim=True)
        return self._world.sum(change_NM.T @ self._x_NE) / self._num_rows + penalty_E * v_ME

    def _newton_step(
        self, point: _Point, penalty_E: Tensor, curvature_ME: Tensor, gap: float
    ) -> Tensor:
        """Returns the Newton step, by conjugate gradients preconditioned with the diagonal.

        The step is solved more exactly near the minimum.
        """
        x_ME = torch.zeros_like(point.gradient)
        residual = -point.gradient
        search_ME = residual / curvature_ME
        residual_square = float((residual * search_ME).sum())
        target_square = residual_square * min(_FORCING, gap**0.5) ** 2
        for _ in range(_MAX_CONJUGATE):
            product = self._hessian_product(point, penalty_E, search_ME)
            curvature = float((search_ME * product).sum())
            if residual_square <= target_square or curvature <= 0:
                break
            x_ME = x_ME + residual_square / curvature * search_ME
            residual = residual - residual_square / curvature * product
            preconditioned = residual / curvature_ME
            previous_square, residual_square = (
                residual_square,
                float((residual * preconditioned).sum()),
            )
            search_ME = preconditioned + residual_square / previous_square * search_ME
        return x_ME

    def _search_line(self, point: _Point, direction_ME: Tensor, penalty_E: Tensor) -> _Point | None:
        """Returns the first point at 1, 1/2, 1/4, ... of the direction that decreases the value
        sufficiently (Armijo), or None.
        """
        slope = float((point.gradient * direction_ME).sum())
        step = 1.0
        for _ in range(_MAX_HALVINGS):
            candidate = self._evaluate(point.weights + step * direction_ME, penalty_E)
            if candidate.value <= point.value + _SUFFICIENT * step * slope:
                return candidate
            step /= 2
        return None
