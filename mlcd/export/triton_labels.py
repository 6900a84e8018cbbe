"""Exports centers beside a model in a Triton repository, so that one call to Triton returns labels.

OUT/NAME-labels/N maps embeddings to their nearest centers by mlcd's exact scan; it contains the
modules of the scan. OUT/NAME-labeled/N is Triton's ensemble of NAME and NAME-labels: images to
embeddings, ids and similarities.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import threadpoolctl

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.manifest import Artifact, Request
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.export.triton import CONFIG_FILE, SCRIPT, lock_model, refuse_foreign, update_config
from mlcd.export.triton_config import (
    LABELED_SUFFIX,
    LABELS_SUFFIX,
    TritonOptions,
    image_input,
    write_ensemble,
    write_labels,
)
from mlcd.images.transform import PreprocessSpec
from mlcd.models.servable import PREPROCESS
from mlcd.progress import Reporter

DEFAULT_TOP: Final = 64
_SCRIPT_SOURCE: Final = Path(__file__).with_name("triton_labels_model.py")
_MLCD: Final = Path(__file__).parents[1]
_SCAN_MODULES: Final = (
    *("__init__.py", "version.py", "errors.py", "types.py", "cores.py", "extras.py"),
    *("randomness.py", "clustering/__init__.py", "clustering/nearest.py"),
    *("clustering/certified_scan.py", "clustering/certificate.py", "clustering/exact_scores.py"),
    *("clustering/matmul.py", "clustering/int8_matmul.py", "clustering/arithmetics.py"),
    *("clustering/shortlist.py", "clustering/rows.py", "clustering/row_threads.py"),
    *("clustering/device_scan.py", "clustering/device_products.py"),
    "clustering/device_kernels.py",
    # without encoders/__init__.py, which imports the code that opens models
    "encoders/unit_rows.py",
)


def export_labels(
    version: Artifact,
    centers: Artifact,
    *,
    top: int = DEFAULT_TOP,
    options: TritonOptions,
    reporter: Reporter,
) -> Artifact:
    """Writes NAME-labels and NAME-labeled beside a version of the model NAME, with the same number,
    and returns the version of the ensemble.

    version: version of `export_triton`. centers: centers of the same model. top: maximum number of
    labels per image. Raises ConfigInvalid for centers of another model, and Conflict if the version
    already has other centers.
    """
    if centers.fingerprint != version.fingerprint:
        raise ConfigInvalid(
            f"the centers are those of another model: they must have the fingerprint"
            f" {version.fingerprint} of {version.path}, got {centers.fingerprint}",
            remedy="cluster the model's own embeddings",
        )
    if top < 1:
        raise InvalidInput(f"top must be at least 1, got {top}")
    loaded = Centers.read(centers)
    export = _Export(version, centers, loaded, min(top, len(loaded.vectors)), options)
    export.publish(LABELS_SUFFIX, export.write_scan, export.labels_config(), reporter)
    return export.publish(LABELED_SUFFIX, lambda _: None, export.ensemble_config(), reporter)


@dataclass(frozen=True)
class _Export:
    """The two label models of one version of a model."""

    version: Artifact
    source: Artifact
    centers: Centers
    top: int
    options: TritonOptions

    @property
    def name(self) -> str:
        return self.version.path.parent.name

    @property
    def number(self) -> int:
        return int(self.version.path.name)

    def publish(
        self, suffix: str, write: Callable[[Path], None], config: str, reporter: Reporter
    ) -> Artifact:
        """Writes one model's version, unless it exists, and lists it in config.pbtxt."""
        out = self.version.path.parent.parent
        folder = out / f"{self.name}{suffix}"
        location = folder / str(self.number)
        settings: dict[str, Any] = {
            "name": folder.name,
            "version": self.number,
            "backend": "python" if suffix == LABELS_SUFFIX else "ensemble",
            "max_batch": self.options.max_batch,
            "centers": self.centers.digest,
            "top": self.top,
            "on_gpu": self.options.on_gpu,
        }
        request = Request(
            "triton",
            settings,
            (
                self.version.as_parent_of(location, "model"),
                self.source.as_parent_of(location, "centers"),
            ),
            self.version.fingerprint,
        )
        refuse_foreign(out, folder)
        with lock_model(folder):
            if (artifact := find_published(location, request)) is None:
                with Draft(location, request) as draft, reporter.stage("labels", None) as meter:
                    write(draft.path)
                    with draft.write(CONFIG_FILE) as path:
                        path.write_text(config)
                    meter.advance(1)
                    num, dimension = self.centers.vectors.shape
                    summary = {"dimension": dimension, "centers": num, "top": self.top}
                    artifact = draft.publish(summary=summary)
            update_config(folder)
        return artifact

    def write_scan(self, folder: Path) -> None:
        """Writes the centers, and a copy of this package's scan."""
        np.save(folder / "vectors.npy", self.centers.vectors, allow_pickle=False)
        if self.centers.mean is not None:
            np.save(folder / "mean.npy", self.centers.mean, allow_pickle=False)
        shutil.copyfile(_SCRIPT_SOURCE, folder / SCRIPT)
        package = folder / "scan" / "mlcd"
        for file in _SCAN_MODULES:
            (package / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(_MLCD / file, package / file)
        shutil.copyfile(Path(threadpoolctl.__file__), folder / "scan" / "threadpoolctl.py")

    def labels_config(self) -> str:
        return write_labels(
            self.name + LABELS_SUFFIX,
            self.options,
            dimension=self.centers.vectors.shape[1],
            top=self.top,
            number=self.number,
            facts=self._facts(),
        )

    def ensemble_config(self) -> str:
        crop = PreprocessSpec.read(self.version.file(PREPROCESS)).crop
        return write_ensemble(
            self.name,
            self.options,
            graph_input=image_input(crop),
            dimension=self.centers.vectors.shape[1],
            top=self.top,
            number=self.number,
            facts=self._facts(),
        )

    def _facts(self) -> dict[str, str]:
        return {"fingerprint": self.centers.fingerprint, "centers": self.centers.digest}
