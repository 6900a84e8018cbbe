"""Reads image and text towers by transformers' own classes, to be traced.

Runs no code of a model's files: neither remote code nor pickles.
"""

import inspect
import math
from collections.abc import Mapping
from copy import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoTokenizer

from mlcd.errors import ArtifactInvalid, ConfigInvalid
from mlcd.export.parity import CAPTIONS, load_photographs
from mlcd.export.traced_model import (
    TracedImages,
    TracedModel,
    TracedTexts,
    build_texts,
    check_finite,
    find_row_length,
    require_safetensors,
    resize_spec,
)
from mlcd.images.transform import Interpolation, PreprocessSpec
from mlcd.models.config_fields import as_size, as_triple, square_side
from mlcd.models.configs import clip_preprocessing
from mlcd.models.json_files import read_object
from mlcd.models.tokenizer import Tokenizer
from mlcd.models.weight_files import HF_CONFIG, HF_PREPROCESSING
from mlcd.models.zoo import LoadOptions

_LOCAL: Final = {"local_files_only": True, "trust_remote_code": False}
_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_INTERPOLATIONS: Final[Mapping[int, Interpolation]] = {2: "bilinear", 3: "bicubic"}
_STEPS: Final = ("do_resize", "do_rescale", "do_normalize", "do_center_crop", "do_convert_rgb")
_MAX_ERROR_CHARS: Final = 300
# ConvNeXt's processor crops below this size, and squashes from it on
_CONVNEXT_SQUARE: Final = 384
# torchvision resizes differently from PIL by up to 18 of 255 levels, but by little on average
_MAX_MEAN_LEVELS: Final = 1.0


def read_transformers(folder: Path, options: LoadOptions, *, text: bool) -> TracedModel:
    """Reads the model in a directory; text: also its text tower, if there is one.

    Raises ConfigInvalid for what cannot be exported, naming the field or the option, and
    ArtifactInvalid for damaged weights.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, untrained = _load(folder)
    processor = _open_processor(folder)
    is_naflex = "spatial_shapes" in _parameters(_vision(model).forward)
    fields = _read_fields(folder, processor)
    spec = _read_spec(folder, fields, model, options, is_naflex=is_naflex)
    is_compared = processor is not None and not is_naflex
    if is_compared:
        _check_preprocessing(processor, spec, folder)
    spec = resize_spec(spec, options)
    tower = (_NaflexTower if is_naflex else _ImageTower)(
        model, options, spec.crop, is_pooler_untrained=untrained
    )
    find_row_length(tower, spec.crop, folder)
    reference = TracedImages(tower, spec).eval()
    images = TracedImages(tower.for_graph(), spec).eval()
    texts = _read_texts(model, folder) if text and hasattr(model, "get_text_features") else None
    facts = {
        "library": f"transformers {transformers.__version__}",
        "class": type(model).__name__,
        "preprocessing_compared": is_compared,
    }
    return TracedModel(images, reference, texts, facts)


def _load(folder: Path) -> tuple[Any, bool]:
    """Returns the model in float32, and whether its pooling layer is missing from the weights."""
    path = folder / HF_CONFIG
    weights = require_safetensors(folder)
    try:
        config = AutoConfig.from_pretrained(folder, **_LOCAL)
    except Exception as error:  # each class checks its own fields
        raise ConfigInvalid(
            f"{path} cannot be read by transformers: {_summarize(error)}"
        ) from error
    (name, *_) = map(str, getattr(config, "architectures", None) or [""])
    # AutoModel would drop the projection of these classes
    by_name = getattr(transformers, name, None) if "WithProjection" in name else None
    try:
        model, info = (by_name or AutoModel).from_pretrained(
            folder,
            config=config,
            **({} if by_name else {"trust_remote_code": False}),
            local_files_only=True,
            use_safetensors=True,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
    except ImportError as error:
        raise ConfigInvalid(f"{folder} needs more packages: {_summarize(error)}") from error
    except Exception as error:  # safetensors and the loader raise many types
        raise ArtifactInvalid(
            f"{weights} cannot be read by transformers: {_summarize(error)}",
            remedy=f"restore the file, and check that {path} belongs to it",
        ) from error
    missing = sorted(info["missing_keys"])
    needed = [name for name in missing if "pooler." not in name]
    if needed:
        raise ArtifactInvalid(
            f"tensor {needed[0]} is missing from {weights}",
            remedy=f"check that {path} belongs to these weights",
        )
    check_finite(model, weights)
    return model.eval(), bool(missing)


def _summarize(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:_MAX_ERROR_CHARS] if lines else type(error).__name__


def _parameters(function: Any) -> Mapping[str, Any]:
    return inspect.signature(function).parameters


def _vision(model: Any) -> Any:
    """Returns the image tower of a model of images and texts, or the model itself."""
    return getattr(model, "vision_model", model)


class _ImageTower(nn.Module):
    """From normalized pixels [B, 3, S, S] to rows [B, D]: those that the model aligns with texts,
    or else its pooled output, or the pooling of the options.
    """

    def __init__(
        self, model: Any, options: LoadOptions, side: int, *, is_pooler_untrained: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.pooling = options.pooling
        self.is_pooler_untrained = is_pooler_untrained
        is_aligned = hasattr(model, "get_image_features") and options.projection
        self.is_aligned = is_aligned and options.pooling is None
        config = _vision(model).config
        self.arguments: dict[str, Any] = {}
        function = model.get_image_features if self.is_aligned else self._inner.forward
        resizes = "interpolate_pos_encoding" in _parameters(function)
        if resizes and _side_of(config) not in (None, side):
            self.arguments["interpolate_pos_encoding"] = True
        patch = getattr(config, "patch_size", None)
        self.num_patches = (side // patch) ** 2 if isinstance(patch, int) else None
        self.side = side

    def for_graph(self) -> "_ImageTower":
        """Returns a tower with the same rows whose graph an engine can run."""
        pooler = getattr(self.model, "pooler", None)
        if not isinstance(pooler, nn.AvgPool2d):
            return self
        # EfficientNet's window is larger than the map, which ends OpenVINO's reader by a signal
        tower: _ImageTower = _copy(self)
        tower.model = _copy(self.model)
        tower.model.pooler = nn.AdaptiveAvgPool2d(1)
        return tower

    @property
    def _inner(self) -> Any:
        # CLIPVisionModelWithProjection: its own output has the projection
        has_text = hasattr(self.model, "get_text_features")
        is_plain = self.pooling is None and not has_text
        return self.model if is_plain else _vision(self.model)

    def forward(self, pixels: Tensor) -> Tensor:
        rows: Tensor = self.pool(self.run(self.inputs(pixels)))
        return rows

    def inputs(self, pixels: Tensor) -> dict[str, Any]:
        return {"pixel_values": pixels, **self.arguments}

    def run(self, inputs: dict[str, Any]) -> Any:
        if self.is_aligned:
            return self.model.get_image_features(**inputs)
        return self._inner(**inputs)

    def pool(self, output: Any) -> Any:
        if self.pooling in (None, "map"):
            if self.pooling == "map" and not hasattr(getattr(self._inner, "head", None), "probe"):
                raise ValueError("it lacks attention pooling: use --pooling cls, mean or last")
            return self._pool_as_model(output)
        states: Tensor = output.last_hidden_state
        if states.dim() == 4:
            if self.pooling != "mean":
                raise ValueError("its output is a map of features: use --pooling mean")
            return states.flatten(2).mean(dim=2)
        if self.pooling == "mean":
            num = states.shape[1]
            return states[:, num - min(self.num_patches or num, num) :].mean(dim=1)
        return states[:, 0 if self.pooling == "cls" else -1]

    def _pool_as_model(self, output: Any) -> Any:
        if isinstance(output, Tensor):
            return output
        rows = getattr(output, "image_embeds", None)
        if rows is None and not self.is_pooler_untrained:
            rows = getattr(output, "pooler_output", None)
        return rows.flatten(1) if isinstance(rows, Tensor) else None


class _NaflexTower(_ImageTower):
    """SigLIP 2's tower with a grid per image, at one square grid: the positions are resized once,
    and no patch is padding.
    """

    def __init__(
        self, model: Any, options: LoadOptions, side: int, *, is_pooler_untrained: bool
    ) -> None:
        super().__init__(model, options, side, is_pooler_untrained=is_pooler_untrained)
        self.patch = int(_vision(model).config.patch_size)
        if side % self.patch:
            raise ConfigInvalid(
                f"--image-size must be a multiple of the patch size {self.patch}, got {side}"
            )
        self.grid = side // self.patch
        embeddings = _vision(model).embeddings
        table = embeddings.position_embedding.weight.detach()
        square = table.reshape(*[embeddings.position_embedding_size] * 2, -1)
        positions = embeddings.resize_positional_embeddings(
            square, torch.tensor([[self.grid] * 2]), max_length=self.grid**2
        )
        self.register_buffer("positions", positions, persistent=False)
        self.traces = False

    def for_graph(self) -> "_NaflexTower":
        tower: _NaflexTower = _copy(self)
        tower.traces = True
        return tower

    def inputs(self, pixels: Tensor) -> dict[str, Any]:
        num, grid, patch = pixels.shape[0], self.grid, self.patch
        squares = pixels.reshape(num, 3, grid, patch, grid, patch).permute(0, 2, 4, 3, 5, 1)
        patches = squares.reshape(num, grid * grid, patch * patch * 3)
        if self.traces:
            shapes = torch.zeros(1, 2, dtype=torch.long)
            return {
                "pixel_values": patches,
                "pixel_attention_mask": None,
                "spatial_shapes": shapes,
            }
        return {
            "pixel_values": patches,
            "pixel_attention_mask": torch.ones(num, grid * grid, dtype=torch.long),
            "spatial_shapes": torch.full((num, 2), grid),
        }

    def run(self, inputs: dict[str, Any]) -> Any:
        embeddings = _vision(self.model).embeddings
        if not self.traces:
            return super().run(inputs)
        # the library resizes in a loop over the images, which has no graph
        embeddings.resize_positional_embeddings = lambda *_, **__: self.positions
        try:
            return super().run(inputs)
        finally:
            del embeddings.resize_positional_embeddings


def _copy(module: Any) -> Any:
    """Returns a module with the same weights, whose children can be replaced."""
    copied = copy(module)
    copied._modules = dict(module._modules)  # noqa: SLF001
    return copied


def _side_of(config: Any) -> int | None:
    size = getattr(config, "image_size", None)
    return size[0] if isinstance(size, list | tuple) else size


def _open_processor(folder: Path) -> Any:
    """Returns the image processor, None without one or if it needs torchvision."""
    if not any((folder / name).is_file() for name in HF_PREPROCESSING):
        return None
    try:
        return AutoImageProcessor.from_pretrained(folder, backend="pil", **_LOCAL)
    except (ImportError, OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        if find_spec("torchvision") is None:  # some classes have no other backend
            return None
        raise ConfigInvalid(
            f"the image processor in {folder} cannot be read: {_summarize(error)}"
        ) from error


def _read_fields(folder: Path, processor: Any) -> dict[str, Any] | None:
    """Returns the fields of the image processor, with the defaults of its class if it opens."""
    if processor is not None:
        return dict(processor.to_dict())
    for name in HF_PREPROCESSING:
        if (folder / name).is_file():
            fields = read_object(folder / name)
            return dict(fields.get("image_processor", fields))
    return None


def _read_spec(
    folder: Path,
    fields: dict[str, Any] | None,
    model: Any,
    options: LoadOptions,
    *,
    is_naflex: bool,
) -> PreprocessSpec:
    path = folder / HF_PREPROCESSING[0]
    if fields is None:
        side = options.image_size or _side_of(_vision(model).config)
        if not options.clip_preprocessing or side is None:
            raise ConfigInvalid(
                f"{folder} lacks {HF_PREPROCESSING[0]}, so its preprocessing is unknown",
                remedy="add the file, or state CLIP's with --preprocess clip",
            )
        return clip_preprocessing(side)
    for name, value in fields.items():
        if name.startswith("do_") and value and name not in _STEPS:
            raise ConfigInvalid(f"{path}: {name} must be false, got {value!r}")
    for name in ("do_resize", "do_rescale"):
        if not fields.get(name, True):
            raise ConfigInvalid(f"{path}: {name} must be true, got {fields[name]!r}")
    factor = fields.get("rescale_factor", 1 / 255)
    if not math.isclose(factor, 1 / 255, rel_tol=1e-6) or fields.get("rescale_offset"):
        raise ConfigInvalid(
            f"{path}: rescale_factor must be 1/255 without rescale_offset, got {factor!r}"
        )
    resample: Any = fields.get("resample")
    if resample not in _INTERPOLATIONS:
        raise ConfigInvalid(f"{path}: resample must be 2 or 3, got {resample!r}")
    mean, std = _read_scale(path, fields)
    if is_naflex:
        num = fields.get("max_num_patches") or _vision(model).config.num_patches
        patch = as_size(path, "patch_size", fields.get("patch_size"))
        side = options.image_size or math.isqrt(num) * patch
        shortest, crop, is_square = side, side, True
    else:
        shortest, crop, is_square = _read_sizes(path, fields)
    return PreprocessSpec(
        resize_shortest=shortest,
        crop=crop,
        mean=mean,
        std=std,
        interpolation=_INTERPOLATIONS[resample],
        resize="square" if is_square else "shortest",
    )


def _read_scale(
    path: Path, fields: dict[str, Any]
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    if not fields.get("do_normalize", True):
        return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    mean = as_triple(path, "image_mean", fields.get("image_mean"))
    std = as_triple(path, "image_std", fields.get("image_std"))
    if fields.get("include_top"):  # EfficientNet's processor divides by std twice
        std = (std[0] ** 2, std[1] ** 2, std[2] ** 2)
    return mean, std


def _read_sizes(path: Path, fields: dict[str, Any]) -> tuple[int, int, bool]:
    """Returns the shortest side, the crop, and whether images are resized to a square."""
    size, crop = fields.get("size"), fields.get("crop_size")
    size = dict(size) if isinstance(size, Mapping) else {"height": size, "width": size}
    is_cropped = bool(fields.get("do_center_crop"))
    if size.get("shortest_edge") is None:
        side = square_side(path, "size", [size.get("height"), size.get("width")])
        if is_cropped and square_side(path, "crop_size", _as_pair(crop)) != side:
            raise ConfigInvalid(f"{path}: crop_size must equal size {side}, got {crop!r}")
        return side, side, True
    shortest = as_size(path, "size.shortest_edge", size["shortest_edge"])
    if fields.get("crop_pct") is not None:
        if shortest >= _CONVNEXT_SQUARE:
            return shortest, shortest, True
        return int(shortest / float(fields["crop_pct"])), shortest, False
    if not is_cropped:
        raise ConfigInvalid(
            f"{path}: do_center_crop must be true with size.shortest_edge, got"
            f" {fields.get('do_center_crop')!r}"
        )
    return shortest, square_side(path, "crop_size", _as_pair(crop)), False


def _as_pair(size: Any) -> Any:
    return [size.get("height"), size.get("width")] if isinstance(size, Mapping) else size


def _check_preprocessing(processor: Any, spec: PreprocessSpec, folder: Path) -> None:
    """Raises ConfigInvalid if the processor's class does more than its fields say."""
    mean, std = (np.array(x, np.float32)[:, None, None] for x in (spec.mean, spec.std))
    for picture in load_photographs():
        theirs = processor(Image.fromarray(picture), return_tensors="np")["pixel_values"][0]
        ours = (spec.apply(Image.fromarray(picture)) / np.float32(255) - mean) / std
        if theirs.shape == ours.shape:
            levels = float((np.abs(theirs - ours) * std).mean()) * 255
            if levels <= _MAX_MEAN_LEVELS:
                continue
        raise ConfigInvalid(
            f"the image processor {type(processor).__name__} in {folder} does more than its fields"
            " say, which mlcd cannot repeat",
            remedy="replace preprocessor_config.json by that of a CLIPImageProcessor or a"
            " SiglipImageProcessor with the same result",
        )


def _open_tokenizer(folder: Path, captions: list[str], context_length: int) -> Tokenizer:
    """Returns the tokenizer of tokenizer.json, or that of transformers' class where it differs.

    Raises ArtifactInvalid if the class does more than a tokenizer.json can say.
    """
    own = Tokenizer.read(folder, context_length)
    try:
        library = AutoTokenizer.from_pretrained(folder, **_LOCAL)
    except Exception:  # noqa: BLE001  # the class may need sentencepiece, or a vocabulary of its own
        return own
    padded = {"padding": "max_length", "truncation": True, "max_length": context_length}
    expected = library(captions, return_tensors="np", **padded)["input_ids"]
    if np.array_equal(own(captions), expected):
        return own
    if (backend := getattr(library, "backend_tokenizer", None)) is not None:
        backend = tokenizers.Tokenizer.from_str(backend.to_str())
        backend.enable_padding(
            length=context_length,
            pad_id=library.pad_token_id,
            pad_token=library.pad_token,
            direction=library.padding_side,
        )
        backend.enable_truncation(context_length, direction=library.truncation_side)
        copied = Tokenizer(backend, read_object(folder / _TOKENIZER_CONFIG), context_length)
        if np.array_equal(copied(captions), expected):
            return copied
    raise ArtifactInvalid(
        f"the tokenizer in {folder} gives other ids than transformers' {type(library).__name__}",
        remedy="omit the text tower with --no-text",
    )


class _TextTower(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        output = self.model.get_text_features(input_ids=ids, attention_mask=mask)
        rows: Tensor = output if isinstance(output, Tensor) else output.pooler_output
        return rows


def _read_texts(model: Any, folder: Path) -> TracedTexts:
    """Returns the text tower, whose tokenizer and rows are those of the library."""
    config = model.config.text_config
    settings = read_object(folder / _TOKENIZER_CONFIG)
    positions = getattr(config, "max_position_embeddings", None)
    context = as_size(folder / HF_CONFIG, "text_config.max_position_embeddings", positions)
    if isinstance(limit := settings.get("model_max_length"), int | float) and limit >= 1:
        context = int(min(context, limit))
    captions = CAPTIONS.read_text(encoding="utf-8").splitlines()
    tokenizer = _open_tokenizer(folder, captions, context)
    if tokenizer.num_ids > config.vocab_size:
        raise ConfigInvalid(
            f"the tokenizer must have at most the text tower's {config.vocab_size} tokens, got"
            f" {tokenizer.num_ids}",
            remedy="check that tokenizer.json belongs to these weights",
        )
    tokens = tokenizer.tokenize(captions)
    ids = torch.from_numpy(tokens.ids)
    mask: Tensor | None = None
    if "attention_mask" in settings.get("model_input_names", ["attention_mask"]):
        columns, num = torch.arange(ids.shape[1]), torch.from_numpy(tokens.num)[:, None]
        starts = num if tokenizer.pads_right else ids.shape[1] - num
        mask = (columns < starts if tokenizer.pads_right else columns >= starts).long()
    tower = _TextTower(model)
    with torch.inference_mode():
        rows = tower(ids, mask)
    bias, scale = getattr(model, "logit_bias", None), getattr(model, "logit_scale", None)
    return build_texts(
        tower,
        tokenizer,
        nn.functional.normalize(rows.float(), dim=1),
        logit_scale=None if scale is None else scale.item(),
        logit_bias=None if bias is None else bias.item(),
    )
