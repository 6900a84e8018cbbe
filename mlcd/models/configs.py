"""The configs of Hugging Face and open_clip: the tower's sizes, its activation, its preprocessing.

A field that a config omits has the default of the class that writes the config; an unsupported
value raises ConfigInvalid.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mlcd.errors import ConfigInvalid
from mlcd.images.transform import CLIP_MEAN, CLIP_STD, PreprocessSpec
from mlcd.models.config_fields import as_activation, as_size, as_triple, expect, square_side
from mlcd.models.json_files import read_object
from mlcd.models.vit import ViTConfig

_PIL_BICUBIC: Final = 3
_ROPE_BASE: Final = 10_000.0
# transformers omits fields that equal the defaults of CLIPVisionConfig and MLCDVisionConfig.
_CLIP_DEFAULTS: Final = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5, "num_channels": 3, "projection_dim": 512,
}  # fmt: skip
_MLCD_DEFAULTS: Final = {
    "hidden_size": 1664, "intermediate_size": 8192, "num_hidden_layers": 48,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14, "hidden_act": "gelu",
    "layer_norm_eps": 1e-5, "num_channels": 3,
}  # fmt: skip
# The defaults of each model_type's vision config; of clip it is a section of the config.
_VISION_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "clip": _CLIP_DEFAULTS, "clip_vision_model": _CLIP_DEFAULTS,
    "mlcd_vision_model": _MLCD_DEFAULTS,
}  # fmt: skip
# The model_type of every config.json that our own classes run.
OUR_MODEL_TYPES: Final = frozenset(_VISION_DEFAULTS)
# The fields of open_clip's vision_cfg that change the architecture, with the supported values.
_SUPPORTED_TOWER: Final = {
    "timm_model_name": None, "ls_init_value": None, "attentional_pool": False, "pool_type": "tok",
    "global_average_pool": False, "no_ln_pre": False, "final_ln_after_pool": False,
    "input_patchnorm": False, "pos_embed_type": "learnable", "act_kwargs": None,
    "norm_kwargs": None,
}  # fmt: skip


def clip_preprocessing(image_size: int) -> PreprocessSpec:
    """Returns the preprocessing of CLIP and MLCD: the shortest side is resized to the model's
    resolution, the central square is cropped, and mean and std are CLIP's.
    """
    return PreprocessSpec(resize_shortest=image_size, crop=image_size)


def hf_section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns `vision_config` or `text_config` of a two-tower config.json.

    In old files of CLIPModel a section with the suffix `_dict` replaces it.
    """
    old = config.get(f"{name}_dict") if config.get("model_type") == "clip" else None
    section: Mapping[str, Any] = old if old is not None else config.get(name) or {}
    return section


def read_hf_config(path: Path, *, projection: bool) -> ViTConfig:
    """Reads the image tower in the config.json of a CLIP or MLCD model of transformers.

    projection: whether the weights have one; the config does not tell, because it names a
    projection_dim even for a tower without projection.
    """
    config = read_object(path)
    kind = str(config.get("model_type"))
    if kind not in _VISION_DEFAULTS:
        raise ConfigInvalid(
            f"{path}: model_type must be one of {', '.join(_VISION_DEFAULTS)}, got {kind!r}"
        )
    vision = hf_section(config, "vision_config") if kind == "clip" else config
    defaults = _VISION_DEFAULTS[kind]
    fields: dict[str, Any] = dict(defaults) | {
        name: vision[name] for name in defaults if vision.get(name) is not None
    }
    if kind == "clip":
        fields["projection_dim"] = config.get("projection_dim", _CLIP_DEFAULTS["projection_dim"])
    expect(path, "num_channels", fields["num_channels"], 3)
    rope = config.get("rope_parameters") or {}
    expect(path, "rope_parameters.rope_theta", rope.get("rope_theta", _ROPE_BASE), _ROPE_BASE)
    expect(path, "num_key_value_groups", config.get("num_key_value_groups", 1), 1)
    return ViTConfig(
        image_size=square_side(path, "image_size", fields["image_size"]),
        patch_size=square_side(path, "patch_size", fields["patch_size"]),
        width=as_size(path, "hidden_size", fields["hidden_size"]),
        depth=as_size(path, "num_hidden_layers", fields["num_hidden_layers"]),
        heads=as_size(path, "num_attention_heads", fields["num_attention_heads"]),
        mlp_width=as_size(path, "intermediate_size", fields["intermediate_size"]),
        embedding_dim=_projection(path, fields) if projection else None,
        activation=as_activation(path, fields["hidden_act"]),
        positions="rope" if kind == "mlcd_vision_model" else "learned",
        norm_eps=float(fields["layer_norm_eps"]),
    )


def _projection(path: Path, fields: Mapping[str, Any]) -> int:
    if "projection_dim" not in fields:
        raise ConfigInvalid(f"{path} lacks projection_dim, but the weights have a projection")
    return as_size(path, "projection_dim", fields["projection_dim"])


def write_hf_config(config: ViTConfig) -> dict[str, Any]:
    """Returns the config.json for the class of transformers that can load this tower; raises
    ConfigInvalid if no such class exists.
    """
    if config.registers:
        raise ConfigInvalid(
            "a tower with registers cannot be written for transformers",
            remedy="export with --format onnx",
        )
    fields = {
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "hidden_act": config.activation,
        "layer_norm_eps": config.norm_eps,
        "num_channels": 3,
        "torch_dtype": "float32",
    }
    if config.positions == "rope":
        if config.embedding_dim is not None:
            raise ConfigInvalid(
                "an MLCD tower with a projection cannot be written for transformers",
                remedy="export with --no-projection",
            )
        return {"architectures": ["MLCDVisionModel"], "model_type": "mlcd_vision_model", **fields}
    name = "CLIPVisionModel" if config.embedding_dim is None else "CLIPVisionModelWithProjection"
    dimension = (
        _CLIP_DEFAULTS["projection_dim"] if config.embedding_dim is None else config.embedding_dim
    )
    return {
        "architectures": [name],
        "model_type": "clip_vision_model",
        "projection_dim": dimension,
        **fields,
    }


def read_hf_preprocessing(path: Path) -> PreprocessSpec:
    """Reads the preprocessor_config.json of CLIP's image processor, or the image_processor in
    processor_config.json.
    """
    config = read_object(path)
    config = config.get("image_processor", config)
    processor = str(config.get("image_processor_type"))
    if processor.startswith("Siglip"):
        raise ConfigInvalid(
            f"{path} must be of CLIP's image processor, got {processor}",
            remedy="export with --with transformers",
        )
    for name in ("do_resize", "do_rescale", "do_normalize", "do_center_crop"):
        expect(path, name, config.get(name, True), True)
    factor = config.get("rescale_factor", 1 / 255)
    if not isinstance(factor, float) or not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        raise ConfigInvalid(f"{path}: rescale_factor must be 1/255, got {factor!r}")
    expect(path, "resample", config.get("resample", _PIL_BICUBIC), _PIL_BICUBIC)
    size, crop = config.get("size", 224), config.get("crop_size", 224)
    shortest = size.get("shortest_edge") if isinstance(size, dict) else size
    return PreprocessSpec(
        resize_shortest=as_size(path, "size.shortest_edge", shortest),
        crop=square_side(path, "crop_size", _height_and_width(crop)),
        mean=as_triple(path, "image_mean", config.get("image_mean", CLIP_MEAN)),
        std=as_triple(path, "image_std", config.get("image_std", CLIP_STD)),
    )


def _height_and_width(size: object) -> object:
    return [size.get("height"), size.get("width")] if isinstance(size, dict) else size


def write_hf_preprocessing(spec: PreprocessSpec) -> dict[str, Any]:
    """Returns the preprocessor_config.json for CLIPImageProcessor."""
    return {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": spec.resize_shortest},
        "do_center_crop": True,
        "crop_size": {"height": spec.crop, "width": spec.crop},
        "do_convert_rgb": True,
        "do_resize": True,
        "resample": _PIL_BICUBIC,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(spec.mean),
        "image_std": list(spec.std),
    }


def read_open_clip_config(path: Path) -> tuple[ViTConfig, PreprocessSpec]:
    """Reads model_cfg and preprocess_cfg of an open_clip_config.json."""
    config = read_object(path)
    model, preprocess = config.get("model_cfg"), config.get("preprocess_cfg")
    if not isinstance(model, dict) or not isinstance(preprocess, dict):
        raise ConfigInvalid(f"{path} lacks model_cfg or preprocess_cfg")
    vision = model.get("vision_cfg", {})
    for name, value in _SUPPORTED_TOWER.items():
        expect(path, f"vision_cfg.{name}", vision.get(name, value), value)
    width = as_size(path, "vision_cfg.width", vision.get("width", 768))
    tower = ViTConfig(
        image_size=square_side(path, "vision_cfg.image_size", vision.get("image_size", 224)),
        patch_size=as_size(path, "vision_cfg.patch_size", vision.get("patch_size", 16)),
        width=width,
        depth=as_size(path, "vision_cfg.layers", vision.get("layers", 12)),
        heads=width // as_size(path, "vision_cfg.head_width", vision.get("head_width", 64)),
        mlp_width=int(width * vision.get("mlp_ratio", 4.0)),
        embedding_dim=as_size(path, "embed_dim", model.get("embed_dim")),
        activation="quick_gelu" if model.get("quick_gelu", False) else "gelu",
    )
    for name, value in (("interpolation", "bicubic"), ("resize_mode", "shortest"), ("mode", "RGB")):
        expect(path, f"preprocess_cfg.{name}", preprocess.get(name, value), value)
    side = square_side(path, "preprocess_cfg.size", preprocess.get("size", tower.image_size))
    spec = PreprocessSpec(
        resize_shortest=side,
        crop=side,
        mean=as_triple(path, "preprocess_cfg.mean", preprocess.get("mean")),
        std=as_triple(path, "preprocess_cfg.std", preprocess.get("std")),
    )
    return tower, spec
