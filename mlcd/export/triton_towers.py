"""The towers of a model, as versions in a Triton repository."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlcd.artifacts.manifest import Artifact, measure
from mlcd.errors import ConfigInvalid
from mlcd.export.graph import EXTERNAL, ONNX, write_image_graph
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

    dimension: dimension of its rows. sizes: text of the sizes that all versions must share. facts:
    its parameters in config.pbtxt, by name. write: writes its files into a folder. check: checks
    the parity of the graph in that folder, and returns the facts for the manifest.
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
    """Returns the image tower.

    graph: model artifact whose graph is copied; None writes the graph from the weights. images:
    images for the check of parity.
    """

    def write(folder: Path) -> None:
        (folder / PREPROCESS).write_text(model.preprocess.to_json())
        if graph is None:
            write_image_graph(model, model.preprocess.crop, folder / ONNX)
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


def graph_tower(graph: Artifact, *, precision: TritonPrecision) -> Tower:
    """Returns the image tower of a model artifact that has graphs without weights.

    Raises ConfigInvalid for half precision, because parity cannot be checked.
    """
    if precision != "fp32":
        raise ConfigInvalid(
            f"{precision} needs the weights of the image tower, got a graph without weights",
            remedy="use precision fp32",
        )
    assert graph.fingerprint is not None
    preprocess = PreprocessSpec.read(graph.file(PREPROCESS))

    def write(folder: Path) -> None:
        for file in {PREPROCESS, ONNX, EXTERNAL} & graph.files.keys():
            shutil.copyfile(graph.file(file), folder / file)

    def check(folder: Path) -> dict[str, Any]:
        del folder  # parity was checked when the graph was made
        return {key: graph.summary[key] for key in graph.summary if key.startswith("parity_")}

    return Tower(
        image_input(preprocess.crop),
        graph.summary["dimension"],
        _image_sizes(graph.summary["dimension"], preprocess),
        graph.fingerprint,
        _image_facts(graph.fingerprint, preprocess),
        write,
        check,
    )


def text_tower(
    part: Path, fingerprint: Fingerprint, *, name: str, precision: TritonPrecision
) -> Tower:
    """Returns the text tower. part: text part of a model artifact.

    Raises ConfigInvalid for half precision without weights, because parity cannot be checked.
    """
    has_weights = (part / WEIGHTS).is_file()
    if precision != "fp32" and not has_weights:
        raise ConfigInvalid(
            f"{precision} needs the weights of the text tower, got a graph without weights",
            remedy="use precision fp32, or omit the text tower with --no-text",
        )

    def write(folder: Path) -> None:
        for file in (GRAPH, GRAPH_DATA, SETTINGS, TOKENIZER):
            if (part / file).is_file():
                shutil.copyfile(part / file, folder / file)

    def check(folder: Path) -> dict[str, Any]:
        if not has_weights:  # parity was checked when the graph was made
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
    """Returns an existing version's parameters in config.pbtxt, and the text of its sizes."""
    assert version.fingerprint is not None
    if TOKENIZER in version.files:
        facts = _text_facts(version.fingerprint, version.files[TOKENIZER].sha256)
        return facts, _text_sizes(TextSettings.read(version.path))
    preprocess = PreprocessSpec.read(version.file(PREPROCESS))
    facts = _image_facts(version.fingerprint, preprocess)
    return facts, _image_sizes(version.summary["dimension"], preprocess)


def _image_sizes(dimension: int, preprocess: PreprocessSpec) -> str:
    return f"dimension {dimension}, images of {preprocess.crop} x {preprocess.crop} pixels"


def _text_sizes(settings: TextSettings) -> str:
    return f"dimension {settings.dimension}, texts of {settings.context_length} tokens"


def _image_facts(fingerprint: Fingerprint, preprocess: PreprocessSpec) -> Mapping[str, str]:
    return {
        "fingerprint": fingerprint,
        "preprocess": json.dumps(json.loads(preprocess.to_json())),
    }


def _text_facts(fingerprint: Fingerprint, tokenizer: str) -> Mapping[str, str]:
    return {"fingerprint": fingerprint, "tokenizer": tokenizer}
