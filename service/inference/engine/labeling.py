"""Labels the rows of an engine's batches with centers that its GPU holds."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.manifest import open_artifact
from mlcd.errors import MlcdError
from mlcd.service.inference.served import EngineOptions
from mlcd.service.telemetry.logs import kinds
from mlcd.types import Embeddings

if TYPE_CHECKING:  # imports torch
    from mlcd.clustering.device_labels import DeviceLabels

_TRIED_TOP: Final = 8  # the default of /v1/labels
_log = logging.getLogger("mlcd.service")


@dataclass
class DeviceCenters:
    """The centers on the device.

    labels: None once a scan has failed.
    """

    centers: Centers
    labels: "DeviceLabels | None"

    @property
    def digest(self) -> str:
        return self.centers.digest

    def label(self, embeddings: Embeddings, top: int) -> NDArray[np.int32]:
        """Returns the nearest centers of unit rows, [N, top]; rows of -1 are left to the server."""
        if self.labels is not None:
            try:
                return self.labels.nearest(self.centers.align(embeddings), top)
            except Exception as error:  # noqa: BLE001 - the embeddings are still good
                _log.error("labels are found on the CPU from now on: %s", kinds(error))
                self.labels = None
        return np.full((len(embeddings), top), -1, np.int32)


def open_centers_on_device(options: EngineOptions, engine: str) -> DeviceCenters | None:
    """Puts the centers of the options on the GPU; returns None, and logs why, if the server finds
    labels on the CPU.

    engine: the engine of the open encoder; only torch uses a GPU.
    """
    if options.centers is None or not _is_on_device(options.centers_device, engine):
        return None
    try:
        from mlcd.clustering.device_labels import DeviceLabels

        centers = Centers.read(
            open_artifact(Path(options.centers), "centers"), mapped=True, with_names=False
        )
        labels = DeviceLabels(centers.vectors, options.centers_device)
        num, dimension = centers.vectors.shape
        for num_rows in (1, options.max_batch):  # compiles and records what most batches need
            labels.nearest(np.zeros((num_rows, dimension), np.float32), min(_TRIED_TOP, num))
    except Exception as error:  # noqa: BLE001 - the server reports damaged centers itself
        reason = error.message if isinstance(error, MlcdError) else kinds(error)
        _log.warning("labels are found on the CPU: %s", reason)
        return None
    _log.info("labels are found on %s: %d centers of %d", options.centers_device, num, dimension)
    slim = replace(centers, names=None, examples=None, audit_rows=None, clusters=None, paths=None)
    return DeviceCenters(slim, labels)


def _is_on_device(device: str, engine: str) -> bool:
    if device != "cuda":
        return True
    if engine != "torch":
        return False
    from mlcd.encoders.torch import cuda_available

    return cuda_available()
