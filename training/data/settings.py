"""The settings that this package reads; `training/config.py` assembles them."""

from typing import Literal, Protocol

from mlcd.training.data.augment_config import AugmentConfig
from mlcd.training.data.data_config import DataConfig, ReadingConfig
from mlcd.training.data.schedule_config import ScheduleConfig
from mlcd.training.tower_config import TowerConfig


class LabelSettings(Protocol):
    """The settings of a loss that decide which labels are read."""

    @property
    def num_stored(self) -> int: ...
    @property
    def label_weights(self) -> Literal["scores"] | None: ...


class DatasetSettings(Protocol):
    """The settings that decide which images and labels a data set has."""

    @property
    def data(self) -> DataConfig: ...
    @property
    def loss(self) -> LabelSettings: ...


class ComputeSettings(Protocol):
    """The settings of a step that decide how its batch is split."""

    @property
    def accumulation(self) -> int: ...


class BatchSettings(Protocol):
    """The settings that decide which samples, crops and colors each batch has."""

    @property
    def seed(self) -> int: ...
    @property
    def data(self) -> ReadingConfig: ...
    @property
    def model(self) -> TowerConfig: ...
    @property
    def augment(self) -> AugmentConfig: ...
    @property
    def schedule(self) -> ScheduleConfig: ...
    @property
    def compute(self) -> ComputeSettings: ...
