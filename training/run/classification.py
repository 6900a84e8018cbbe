"""The training of a tower with a classifier: the work that the loop repeats."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from mlcd.errors import ConfigInvalid
from mlcd.models.servable import Servable
from mlcd.training.config import RunConfig
from mlcd.training.data.dataset import Dataset
from mlcd.training.data.loader import Batch, Loader, StepBatches
from mlcd.training.head.state import TrainState
from mlcd.training.processes import Processes
from mlcd.training.step import Meters, train_step
from mlcd.world import World


class Evaluate(Protocol):
    """Evaluates a model during training; every process calls it with the same weights."""

    def __call__(self, model: Servable, *, world: World) -> dict[str, float]: ...


class OpenEvaluation(Protocol):
    """Opens the evaluation of a run's config; returns None without evaluation.every_steps.

    listings: digests of the listings of the run's images. Raises ConfigInvalid or InvalidInput if
    the evaluation would fail.
    """

    def __call__(self, config: RunConfig, listings: Sequence[str]) -> Evaluate | None: ...


def open_no_evaluation(config: RunConfig, listings: Sequence[str]) -> None:
    """Returns None. Raises ConfigInvalid if the config sets an evaluation."""
    del listings
    if config.evaluation.every_steps is not None:
        raise ConfigInvalid(
            f"evaluation.every_steps={config.evaluation.every_steps} requires the argument"
            " open_evaluation",
            remedy="train with `mlcd train`, or pass open_evaluation",
        )


@dataclass(frozen=True)
class Classification:
    """A training run on labels: its state, data set and config.

    evaluation: evaluates the model; None without evaluation.every_steps.
    """

    state: TrainState
    dataset: Dataset
    config: RunConfig
    processes: Processes
    evaluation: Evaluate | None

    @contextmanager
    def load(self) -> Iterator[Iterator[StepBatches[Batch]]]:
        """Opens the batches of all remaining steps, starting at `state.step`."""
        loader = Loader(
            self.dataset,
            self.config,
            rank=self.processes.world.rank,
            size=self.processes.world.size,
            start_step=self.state.step,
            num_labels=self.config.loss.num_labels,
            cores=self.processes.cores,
            device=self.processes.device,
        )
        with loader, self.state.copies.prefetch_first_images(iter(loader)) as steps:
            yield steps

    def step(
        self,
        batch: StepBatches[Batch],
        shares: Sequence[float],
        row_counts: Sequence[Sequence[int]],
    ) -> Meters:
        """Updates the state once, without advancing `state.step`. Arguments: see `train_step`."""
        return train_step(self.state, batch.parts, shares, self.config, row_counts)

    def evaluate(self) -> dict[str, float] | None:
        """Returns the metrics at the current step; None if no evaluation is due."""
        every_steps = self.config.evaluation.every_steps
        if not every_steps or self.state.step % every_steps:
            return None
        assert self.evaluation is not None
        return self.evaluation(self.state.servable(), world=self.processes.world)
