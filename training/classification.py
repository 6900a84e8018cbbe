"""The training of a tower with a classifier: the work that the loop repeats."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from training.config import RunConfig
from training.data.dataset import Dataset
from training.data.loader import Batch, Loader, StepBatches
from training.evaluation.image_features import PreparedImages
from training.evaluation.while_training import evaluate_model
from training.processes import Processes
from training.state import TrainState
from training.step import Meters, train_step


@dataclass(frozen=True)
class Classification:
    """The state with its samples.

    evaluation: the result of `check_evaluation`.
    """

    state: TrainState
    dataset: Dataset
    config: RunConfig
    processes: Processes
    evaluation: PreparedImages | None

    @contextmanager
    def load(self) -> Iterator[Iterator[StepBatches[Batch]]]:
        """Opens the batches of the steps from the state's on."""
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
        with loader, self.state.copies.first_ahead(iter(loader)) as steps:
            yield steps

    def step(
        self,
        batch: StepBatches[Batch],
        shares: Sequence[float],
        row_counts: Sequence[Sequence[int]],
    ) -> Meters:
        """Updates the state once, without counting the step."""
        return train_step(self.state, batch.parts, shares, self.config, row_counts)

    def evaluate(self) -> dict[str, float] | None:
        """Returns what is measured after the state's last step; None if nothing is due."""
        every_steps = self.config.evaluation.every_steps
        if not every_steps or self.state.step % every_steps:
            return None
        return evaluate_model(
            self.state.servable(),
            self.config,
            world=self.processes.world,
            images=self.evaluation,
        )
