"""Floors and ceilings of the study.

They are the most frequent class, raw pixels, the features that were clustered, and on CIFAR a
network trained on CIFAR itself.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from studies.losses.data import make
from studies.losses.hardware import origin
from studies.losses.measure import Measurement, encode_reference, measure, measure_majority
from studies.losses.run import RESULT, Study
from studies.losses.sets import EvaluationSet
from studies.losses.tiers import MOBILENET

MAJORITY: Final = "majority"
_RESNET: Final = "encoders/resnet_cifar10/resnet20.onnx"
_CIFAR: Final = "cifar10_jpg"
# Its provenance states RGB / 255 normalized with ImageNet's statistics, 32 px.
_RESNET_INPUT: Final = {
    "name": "resnet20",
    "input": "pixel_values",
    "layout": "NCHW",
    "resize_shortest": 32,
    "crop": 32,
    "interpolation": "bicubic",
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "output": "features",
    "dimension": 64,
}


def perform_references(study: Study) -> None:
    """Measures the references that are not measured yet."""
    models = _models(study)
    for name in (MAJORITY, *models):
        for images in study.evaluation_sets():
            result = _folder(study) / name / images.name / RESULT
            if result.is_file() or (name == "resnet20" and images.name != _CIFAR):
                continue
            result.parent.mkdir(parents=True, exist_ok=True)
            found = (
                measure_majority(images)
                if name == MAJORITY
                else _measured(study, name, models[name], images)
            )
            written = result.with_suffix(".partial")
            written.write_text(
                json.dumps(_record(name, images, [asdict(each) for each in found]), indent=1) + "\n"
            )
            written.rename(result)


def _measured(study: Study, name: str, model: str, images: EvaluationSet) -> Iterator[Measurement]:
    rows = _embedded(study, name, model, images)
    return measure(images, encode_reference(rows, images.test))


def references(study: Study) -> Iterator[dict[str, Any]]:
    """Yields records like those of runs."""
    for path in sorted(_folder(study).glob(f"*/*/{RESULT}")):
        yield json.loads(path.read_text())


def _folder(study: Study) -> Path:
    return study.state / "references"


def _models(study: Study) -> dict[str, str]:
    """Returns, by name, the models for `mlcd embed --model`."""
    return {
        "pixels": "pixels",
        "mobilenet_v2": str(study.data / MOBILENET),
        "resnet20": str(resnet_model(study.data, study.state)),
    }


def resnet_model(data: Path, state: Path) -> Path:
    """Returns the encoder beside which its input is stated, copied to the state once."""
    resnet = state / "resnet20" / "resnet20.onnx"
    if not resnet.is_file():
        resnet.parent.mkdir(parents=True, exist_ok=True)
        resnet.with_suffix(".json").write_text(json.dumps(_RESNET_INPUT))
        shutil.copyfile(data / _RESNET, resnet)
    return resnet


def _embedded(study: Study, name: str, model: str, images: EvaluationSet) -> np.ndarray:
    out = _folder(study) / name / images.name / "embeddings"
    make(out, "embed", images.location, out, "--model", model)
    stored = EmbeddingsArtifact.open(out)
    row_of_key = {key: row for row, key in enumerate(stored.keys)}
    return stored.load()[[row_of_key[key] for key in images.keys]]


def _record(name: str, images: EvaluationSet, measured: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": f"reference/{name}/{images.name}",
        "stage": "reference",
        "arm": name,
        "seed": 0,
        "setting": {},
        "variant": {},
        "steps": 0,
        "threads": 0,
        "train_s": 0.0,
        "train_cpu_s": 0.0,
        "evaluation_s": 0.0,
        "origin": origin().to_dict(),
        "measurements": measured,
    }
