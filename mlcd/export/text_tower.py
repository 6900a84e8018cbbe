"""Finds the text tower of an exported model, and writes its files after a check of parity."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from mlcd.artifacts.manifest import Artifact
from mlcd.errors import ArtifactInvalid, ConfigInvalid, MlcdError
from mlcd.export.graph import write_graph
from mlcd.export.parity import Parity, check_text_parity
from mlcd.models.json_files import read_object
from mlcd.models.servable import Servable
from mlcd.models.servable_text import ServableText
from mlcd.models.text_part import (
    FOLDER,
    GRAPH,
    GRAPH_DATA,
    SETTINGS,
    TOKENIZER,
    WEIGHTS,
    text_digest,
)
from mlcd.models.two_tower_files import (
    TwoTowerModel,
    read_two_towers,
    states_two_towers,
    write_two_towers,
)
from mlcd.models.two_towers import TwoTowers
from mlcd.models.weight_files import HF_CONFIG, locate
from mlcd.models.zoo import LoadOptions

_FILES = (GRAPH, GRAPH_DATA, SETTINGS, TOKENIZER, "tokenizer_config.json")


@dataclass(frozen=True)
class TextOrigin:
    """The origin of an exported text tower.

    load: function that loads it into our own class; None for a graph without weights, whose files
    are copied. part: text part of a model artifact. facts: the part's fields in the manifest.
    """

    load: Callable[[], ServableText] | None
    part: Path | None = None
    facts: dict[str, Any] | None = None


def find_text(spec: str, options: LoadOptions) -> TextOrigin | None:
    """Returns the text tower in a model's directory; None if there is none, if it lacks a
    tokenizer.json, or if the options put images into a different space.
    """
    if not _has_text(spec, options) or lacks_tokenizer(spec, options):
        return None
    return TextOrigin(partial(_load, spec))


def lacks_tokenizer(spec: str, options: LoadOptions) -> bool:
    """Tells whether a usable text tower lacks only its tokenizer.json."""
    if not options.projection or options.like is not None or options.pooling is not None:
        return False
    folder = locate(spec)
    if not folder.is_dir() or (folder / TOKENIZER).is_file():
        return False
    config = folder / HF_CONFIG
    return states_two_towers(folder) or (config.is_file() and "text_config" in read_object(config))


def _has_text(spec: str, options: LoadOptions) -> bool:
    # without the projection, or with --like, images lie in a different space than texts
    if not options.projection or options.like is not None:
        return False
    folder = locate(spec)
    return folder.is_dir() and states_two_towers(folder)


def text_of_artifact(model: Artifact) -> TextOrigin | None:
    """Returns the text tower of a model artifact, or None if it has none."""
    if f"{FOLDER}/{SETTINGS}" not in model.files:
        return None
    folder = model.path / FOLDER
    load = partial(ServableText.read, folder) if f"{FOLDER}/{WEIGHTS}" in model.files else None
    facts = {
        key: value for key, value in model.summary.items() if key.startswith(("text_", "bridge"))
    }
    return TextOrigin(load, folder, facts)


def _load(spec: str) -> ServableText:
    try:
        model = read_two_towers(spec)
        return ServableText.of(model.towers, model.tokenizer)
    except MlcdError as error:
        hint = "omit the text tower with --no-text"
        error.remedy = f"{error.remedy}, or {hint}" if error.remedy else hint
        raise


def write_text(origin: TextOrigin, folder: Path, name: str) -> dict[str, Any]:
    """Writes a text part into an existing folder; returns its facts for the manifest.

    Raises ArtifactInvalid if the graph disagrees with the tower on captions.
    """
    if origin.load is None:
        assert origin.part is not None
        for file in _FILES:
            if (origin.part / file).is_file():
                shutil.copyfile(origin.part / file, folder / file)
        return dict(origin.facts or {})
    model = origin.load()
    model.write(folder)
    write_text_onnx(model, model.settings.context_length, folder / GRAPH)
    return text_facts(check_text_parity(model, folder / GRAPH, name))


def write_hf_both(images: Servable, origin: TextOrigin, folder: Path) -> str:
    """Writes the files of CLIPModel and its processors, reads the text tower back, and returns the
    digest of the text part.

    Raises ConfigInvalid if transformers lacks a class for the towers, and ArtifactInvalid if the
    text tower differs when it is read back.
    """
    if origin.load is None:
        raise ConfigInvalid(
            "transformers needs the weights of the text tower, got a graph without weights",
            remedy="omit the text tower with --no-text",
        )
    text = origin.load()
    settings, bias = text.settings, text.settings.logit_bias
    towers = TwoTowers(
        images.trunk,
        text.trunk,
        logit_scale=torch.tensor(settings.logit_scale),
        logit_bias=None if bias is None else torch.tensor(bias),
    )
    write_two_towers(TwoTowerModel(towers, images.preprocess, text.tokenizer), folder)
    reloaded = _load(str(folder))
    is_same = reloaded.settings == settings and all(
        torch.equal(tensor, text.trunk.state_dict()[name])
        for name, tensor in reloaded.trunk.state_dict().items()
    )
    if not is_same:
        raise ArtifactInvalid(
            "the exported text tower differs from the model when it is read back",
            remedy="nothing was exported; report this",
        )
    with TemporaryDirectory() as part:
        text.write(Path(part))
        return text_digest(Path(part))


def text_facts(parity: Parity) -> dict[str, Any]:
    """Returns the fields for the manifest."""
    return {
        "text_parity_min_cosine": parity.min_cosine,
        "text_parity_captions": parity.num,
        "text_parity_measured": parity.measured,
    }


def write_text_onnx(model: nn.Module, context_length: int, path: Path) -> None:
    """Writes a graph with input `ids`, int64 [N, T] of at most `context_length` tokens, and output
    `embedding`, float32 unit rows [N, D].
    """
    dims = {
        0: torch.export.Dim("batch", min=1, max=65536),
        1: torch.export.Dim("tokens", min=1, max=context_length),
    }
    example = torch.zeros((2, min(3, context_length)), dtype=torch.int64)
    write_graph(model, example, path, input_name="ids", dims=dims)
