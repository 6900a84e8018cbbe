"""CLIP's linear probe (Radford et al. 2021, appendix A.3), a logistic regression on fixed features.

The features are not normalized. C is searched from coarse to fine on a log grid of 96 steps from
1e-6 to 1e6, by the metric on validation images. The tested model is fitted again with the best C,
on training and validation images together.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlcd.training.data.order import own_part
from mlcd.training.evaluation.gathering import gather_answers
from mlcd.training.evaluation.logistic_regression import LogisticRegression, PrincipalRows, Solution
from mlcd.training.evaluation.scores import Answers, Metric, answers
from mlcd.training.evaluation.splits import LabeledRows, Split, check_probe_split
from mlcd.world import World

NUM_STEPS: Final = 96  # 8 per decade, as in the appendix
_DECADES: Final = 12
# The appendix starts with every second power of ten and halves the interval from there.
_COARSE: Final = 16


def grid_c(index: int) -> float:
    """Returns the C of a grid point: 1e-6 at 0, 1e6 at 96.

    CLIP's lambda is 1/C, so the grid is the same.
    """
    return float(10.0 ** (_DECADES * index / NUM_STEPS - _DECADES / 2))


def coarse_to_fine(score: Callable[[int], float]) -> int:
    """Returns the best grid point, searched by halving the interval around the peak.

    Ties go to the smaller C.
    """
    scores: dict[int, float] = {}
    spacing, indices = _COARSE, list(range(0, NUM_STEPS + 1, _COARSE))
    while True:
        for index in indices:
            scores[index] = score(index)
        best = min(scores, key=lambda index: (-scores[index], index))
        if spacing == 1:
            return best
        spacing //= 2
        indices = [index for index in (best - spacing, best + spacing) if 0 <= index <= NUM_STEPS]


@dataclass(frozen=True)
class _Rows:
    """This process's share of one part (such as train) of the samples.

    features: float64 [n, D]. classes: int64 [n].
    """

    features: Tensor
    classes: Tensor

    @classmethod
    def of(
        cls, samples: LabeledRows, mask: NDArray[np.bool_], world: World, device: torch.device
    ) -> "_Rows":
        chosen = np.flatnonzero(mask)
        chosen = chosen[own_part(len(chosen), world.rank, world.size)]
        features = torch.from_numpy(samples.rows[chosen]).to(device, torch.float64)
        return cls(features, torch.from_numpy(samples.classes[chosen]).to(device))

    def answers(self, solution: Solution, world: World) -> Answers:
        """Returns the answers about the whole part; every process gets all."""
        logits = solution.logits(self.features).cpu().numpy()
        return gather_answers(answers(logits, self.classes.cpu().numpy()), world)


@dataclass(frozen=True)
class Probe:
    """A fitted linear probe and its answers about the test samples.

    validation: the metric on validation samples, by which C was chosen.
    """

    answers: Answers
    solution: Solution
    validation: float
    split: Split

    def facts(self, metric: Metric) -> Iterator[tuple[str, float]]:
        """Yields the metric on test and validation samples, the chosen C, the objective, and the
        size of each part.
        """
        name = metric.replace("-", "_")
        yield f"linear_probe_{name}", self.answers.score(metric)
        yield f"validation_{name}", self.validation
        yield "c", self.solution.c
        yield "objective", self.solution.objective
        yield "objective_gap", self.solution.gap
        for part in ("train", "validation", "test"):
            yield f"{part}_images", float(getattr(self.split, part).sum())


def linear_probe(
    samples: LabeledRows,
    *,
    hold_out: float,
    metric: Metric,
    world: World | None = None,
    device: torch.device | None = None,
) -> Iterator[tuple[str, float]]:
    """Yields the facts of `fit_probe`."""
    probe = fit_probe(samples, hold_out=hold_out, metric=metric, world=world, device=device)
    yield from probe.facts(metric)


def fit_probe(
    samples: LabeledRows,
    *,
    hold_out: float,
    metric: Metric,
    world: World | None = None,
    device: torch.device | None = None,
) -> Probe:
    """Chooses C by the metric on validation samples, and fits the tested model.

    hold_out: share of each class to test on if the samples lack a split. All processes return the
    same result, for any number of processes. Raises InvalidInput if a part is empty, or a class has
    no training sample.
    """
    world, device = world or World(), device or torch.device("cpu")
    split = samples.split(hold_out)
    check_probe_split(samples.class_names, split)
    num_classes = len(set(samples.class_names))
    train = _Rows.of(samples, split.train, world, device)
    validation = _Rows.of(samples, split.validation, world, device)
    validation_score, start = choose_c(train, validation, num_classes, metric, world)
    fitted = _Rows.of(samples, split.train | split.validation, world, device)
    final = LogisticRegression(
        PrincipalRows(fitted.features, world), fitted.classes, num_classes
    ).fit(start.c, start=start)
    tested = _Rows.of(samples, split.test, world, device)
    return Probe(tested.answers(final, world), final, validation_score, split)


def choose_c(
    train: _Rows, validation: _Rows, num_classes: int, metric: Metric, world: World
) -> tuple[float, Solution]:
    """Returns the best validation score of the search, and its solution on `train`."""
    problem = LogisticRegression(PrincipalRows(train.features, world), train.classes, num_classes)
    solutions: dict[int, Solution] = {}
    scores: dict[int, float] = {}

    def score(index: int) -> float:
        nearest = min(solutions, key=lambda solved: abs(solved - index), default=None)
        solutions[index] = problem.fit(
            grid_c(index), start=None if nearest is None else solutions[nearest]
        )
        scores[index] = validation.answers(solutions[index], world).score(metric)
        return scores[index]

    best = coarse_to_fine(score)
    return scores[best], solutions[best]
