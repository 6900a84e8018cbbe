"""Reads image towers by timm's own classes, to be traced."""

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import timm
from timm.data import resolve_data_config

from mlcd.errors import ArtifactInvalid, ConfigInvalid
from mlcd.export.traced_model import (
    TracedImages,
    TracedModel,
    check_finite,
    find_row_length,
    require_safetensors,
    resize_spec,
)
from mlcd.images.transform import PreprocessSpec
from mlcd.models.config_fields import as_triple, expect, square_side
from mlcd.models.json_files import read_object
from mlcd.models.weight_files import HF_CONFIG
from mlcd.models.zoo import LibraryPooling, LoadOptions

_POOLINGS: Final[Mapping[LibraryPooling, str]] = {"cls": "token", "mean": "avg", "map": "map"}
_FIELDS: Final = (
    "input_size", "fixed_input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std",
    "classifier", "first_conv",
)  # fmt: skip


def read_timm(folder: Path, options: LoadOptions) -> TracedModel:
    """Reads the model in a directory, without its classifier or projection.

    Raises ConfigInvalid for what cannot be exported, naming the field or the option, and
    ArtifactInvalid for damaged weights.
    """
    path = folder / HF_CONFIG
    config = read_object(path)
    model = _load(folder, config, options)
    spec = resize_spec(_read_spec(path, model), options)
    find_row_length(model, spec.crop, folder)
    images = TracedImages(model, spec).eval()
    facts = {"library": f"timm {timm.__version__}", "class": str(config["architecture"])}
    return TracedModel(images, images, None, facts)


def _load(folder: Path, config: dict[str, Any], options: LoadOptions) -> Any:
    path, weights = folder / HF_CONFIG, require_safetensors(folder)
    name = config.get("architecture")
    if not isinstance(name, str) or not timm.is_model(name):
        raise ConfigInvalid(
            f"{path}: architecture must be a model of timm {timm.__version__}, got {name!r}"
        )
    arguments = dict(config.get("model_args") or {})
    for argument in arguments.keys() & inspect.signature(timm.create_model).parameters.keys():
        raise ConfigInvalid(f"{path}: model_args must not have {argument}")  # such as a checkpoint
    if options.image_size is not None:
        arguments["img_size"] = options.image_size
    if options.pooling is not None:
        if options.pooling not in _POOLINGS:
            raise ConfigInvalid(
                f"timm lacks the pooling {options.pooling}", remedy="use --pooling cls, mean or map"
            )
        arguments["global_pool"] = _POOLINGS[options.pooling]
    elif config.get("global_pool"):
        arguments["global_pool"] = config["global_pool"]
    fields = config.get("pretrained_cfg") or {}
    # not its other fields, which name places to load from
    cfg = {key: fields[key] for key in _FIELDS if key in fields} | {"file": str(weights)}
    cfg["num_classes"] = config.get("num_classes", fields.get("num_classes", 0))
    arguments |= {"pretrained": True, "pretrained_cfg": cfg, "num_classes": cfg["num_classes"]}
    try:
        model = _create(name, arguments)
    except (TypeError, ValueError, AssertionError, AttributeError) as error:
        raise ConfigInvalid(f"{path} cannot be read by timm: {error}") from error
    except Exception as error:  # safetensors and torch raise many types
        pooling = "" if options.pooling is None else f" with --pooling {options.pooling}"
        raise ArtifactInvalid(
            f"{weights} does not fit {name}{pooling}:"
            f" {' '.join(line.strip() for line in str(error).splitlines()[:2])}",
            remedy="restore the file, or choose another --pooling",
        ) from error
    check_finite(model, weights)
    # only after all weights are in place, because timm skips missing ones without a classifier
    model.reset_classifier(0)
    return model.eval()


def _create(name: str, arguments: dict[str, Any]) -> Any:
    try:
        return timm.create_model(name, **arguments)
    except TypeError:  # convolutions take images of any size
        if "img_size" not in arguments:
            raise
        del arguments["img_size"]
        return timm.create_model(name, **arguments)


def _read_spec(path: Path, model: Any) -> PreprocessSpec:
    """Returns timm's preprocessing for evaluation."""
    fields = resolve_data_config({}, model=model)
    side = square_side(path, "input_size", fields["input_size"][1:])
    mode, share = fields["crop_mode"], float(fields["crop_pct"])
    interpolation = fields["interpolation"]
    if interpolation not in ("bicubic", "bilinear"):
        raise ConfigInvalid(
            f"{path}: interpolation must be bicubic or bilinear, got {interpolation!r}"
        )
    if mode == "squash":
        expect(path, "crop_pct", share, 1.0)
    else:
        expect(path, "crop_mode", mode, "center")
    return PreprocessSpec(
        resize_shortest=math.floor(side / share),
        crop=side,
        mean=as_triple(path, "mean", fields["mean"]),
        std=as_triple(path, "std", fields["std"]),
        interpolation=interpolation,
        resize="square" if mode == "squash" else "shortest",
    )
