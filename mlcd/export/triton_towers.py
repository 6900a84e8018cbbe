"""The towers of a model as they become versions of models in a Triton repository."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlcd.artifacts.manifest import Artifact, measure
from mlcd.errors import ConfigInvalid
from mlcd.export.graph import EXTERNAL
from mlcd.export.model_artifact import ONNX, write_onnx
from mlcd.export.parity import check_parity, check_text_parity
from mlcd.export.triton_config import GraphInput, TritonPrecision, image_input, text_input
from mlcd.images.transform import PreprocessSpec
from mlcd.models.servable import PREPROCESS, Servable
from mlcd.models.servable_text import ServableText
from mlcd.models.text_part import GRAPH, GRAPH_DATA, SETTINGS, TOKENIZER, WEIGHTS, TextSettings
from mlcd.types import Fingerprint


@dataclass(frozen=True)
class Tower:
    """One tower of a model, as a version in a repository.

    dimension: of its rows. sizes: what all versions of a model share, in words. facts: what
    config.pbtxt says of the version, by name. write: puts its files into a folder. check: measures
    the parity of the graph there, and returns the facts for the manifest.
    """

    graph_input: GraphInput
    dimension: int
    sizes: str
    fingerprint: Fingerprint
    facts: Mapping[str, str]
    write: Callable[[Path], None]
    check: Callable[[Path], dict[str, Any]]


def image_tower(
    model: Servable,
    fingerprint: Fingerprint,
    *,
    graph: Artifact | None,
    images: str | None,
    name: str,
    precision: TritonPrecision,
) -> Tower:
    """Returns the tower of images. graph: the model artifact whose graph is copied, where there is
    one. images: those on which parity is measured.
    """

    def write(folder: Path) -> None:
        (folder / PREPROCESS).write_text(model.preprocess.to_json())
        if graph is None:
            write_onnx(model, folder / ONNX)
            return
        for file in {ONNX, EXTERNAL} & graph.files.keys():
            shutil.copyfile(graph.file(file), folder / file)

    def check(folder: Path) -> dict[str, Any]:
        return check_parity(model, folder / ONNX, images, name, precision=precision).summary()

    dimension = model.trunk.config.output_dim
    return Tower(
        image_input(model.preprocess.crop),
        dimension,
        _image_sizes(dimension, model.preprocess),
        fingerprint,
        _image_facts(fingerprint, model.preprocess),
        write,
        check,
    )


def text_tower(
    part: Path, fingerprint: Fingerprint, *, name: str, precision: TritonPrecision
) -> Tower:
    """Returns the tower of texts. part: the text part of a model artifact.

    Raises ConfigInvalid for half precision without weights to measure it by.
    """
    has_weights = (part / WEIGHTS).is_file()
    if precision != "fp32" and not has_weights:
        raise ConfigInvalid(
            f"the text tower is a graph without weights, by which {precision} could be judged",
            remedy="use precision fp32, or leave the texts out with --no-text",
        )

    def write(folder: Path) -> None:
        for file in (GRAPH, GRAPH_DATA, SETTINGS, TOKENIZER):
            if (part / file).is_file():
                shutil.copyfile(part / file, folder / file)

    def check(folder: Path) -> dict[str, Any]:
        if not has_weights:  # measured where the graph was made
            return {}
        parity = check_text_parity(
            ServableText.read(part), folder / GRAPH, name, precision=precision
        )
        return {
            "parity_min_cosine": parity.min_cosine,
            "parity_captions": parity.num,
            "parity_measured": parity.measured,
        }

    settings = TextSettings.read(part)
    return Tower(
        text_input(settings.context_length),
        settings.dimension,
        _text_sizes(settings),
        fingerprint,
        _text_facts(fingerprint, measure(part / TOKENIZER).sha256),
        write,
        check,
    )


def read_facts(version: Artifact) -> tuple[Mapping[str, str], str]:
    """Returns what config.pbtxt says of an existing version, and its sizes in words."""
    assert version.fingerprint is not None
    if TOKENIZER in version.files:
        facts = _text_facts(version.fingerprint, version.files[TOKENIZER].sha256)
        return facts, _text_sizes(TextSettings.read(version.path))
    preprocess = PreprocessSpec.read(version.file(PREPROCESS))
    facts = _image_facts(version.fingerprint, preprocess)
    return facts, _image_sizes(version.summary["dimension"], preprocess)


def _image_sizes(dimension: int, preprocess: PreprocessSpec) -> str:
    return f"{dimension} numbers of {preprocess.crop} x {preprocess.crop} pixels"


def _text_sizes(settings: TextSettings) -> str:
    return f"{settings.dimension} numbers of {settings.context_length} tokens"


def _image_facts(fingerprint: Fingerprint, preprocess: PreprocessSpec) -> Mapping[str, str]:
    return {
        "fingerprint": fingerprint,
        "preprocess": json.dumps(json.loads(preprocess.to_json())),
    }


def _text_facts(fingerprint: Fingerprint, tokenizer: str) -> Mapping[str, str]:
    return {"fingerprint": fingerprint, "tokenizer": tokenizer}
