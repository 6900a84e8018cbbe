"""The configs of Hugging Face and open_clip: the tower's sizes, its activation, its preprocessing.

A field that a config leaves out has the default of the class that writes it; a value that we cannot
honor is refused.
"""

import json
import math
from pathlib import Path
from typing import Any, Final

from mlcd.errors import ArtifactInvalid, ConfigInvalid
from mlcd.images.transform import CLIP_MEAN, CLIP_STD, PreprocessSpec
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
# The fields of open_clip's vision_cfg that change the architecture, with CLIP's values.
_PLAIN_TOWER: Final = {
    "timm_model_name": None, "ls_init_value": None, "attentional_pool": False, "pool_type": "tok",
    "global_average_pool": False, "no_ln_pre": False, "final_ln_after_pool": False,
    "input_patchnorm": False, "pos_embed_type": "learnable",
}  # fmt: skip


def clip_preprocessing(image_size: int) -> PreprocessSpec:
    """Returns the preprocessing of CLIP and MLCD.

    The shortest side becomes the model's resolution, the central square is taken, and the
    statistics are CLIP's.
    """
    return PreprocessSpec(resize_shortest=image_size, crop=image_size)


def read_hf_config(path: Path, *, projection: bool) -> ViTConfig:
    """Reads the config.json of CLIPVisionModel(WithProjection), CLIPModel or MLCDVisionModel.

    projection: true where the weights hold one; the config of a bare tower names a dimension that
    nothing has.
    """
    config = _read(path)
    kind = config.get("model_type")
    if kind == "mlcd_vision_model":
        vision, defaults = config, _MLCD_DEFAULTS
    elif kind in ("clip", "clip_vision_model"):
        vision, defaults = (
            config.get("vision_config", {}) if kind == "clip" else config,
            _CLIP_DEFAULTS,
        )
    else:
        raise ConfigInvalid(
            f"{path} is of a {kind!r} model",
            remedy="clip, clip_vision_model, mlcd_vision_model are known",
        )
    fields: dict[str, Any] = defaults | {
        name: vision[name] for name in defaults if vision.get(name) is not None
    }
    if kind == "clip":
        fields["projection_dim"] = config.get("projection_dim", _CLIP_DEFAULTS["projection_dim"])
    _expect(path, "num_channels", fields["num_channels"], 3)
    rope = config.get("rope_parameters") or {}
    _expect(path, "rope_parameters.rope_theta", rope.get("rope_theta", _ROPE_BASE), _ROPE_BASE)
    _expect(path, "num_key_value_groups", config.get("num_key_value_groups", 1), 1)
    return ViTConfig(
        image_size=_side(path, "image_size", fields["image_size"]),
        patch_size=_side(path, "patch_size", fields["patch_size"]),
        width=_whole(path, "hidden_size", fields["hidden_size"]),
        depth=_whole(path, "num_hidden_layers", fields["num_hidden_layers"]),
        heads=_whole(path, "num_attention_heads", fields["num_attention_heads"]),
        mlp_width=_whole(path, "intermediate_size", fields["intermediate_size"]),
        embedding_dim=_whole(path, "projection_dim", fields["projection_dim"])
        if projection
        else None,
        activation=_activation(path, fields["hidden_act"]),
        positions="rope" if kind == "mlcd_vision_model" else "learned",
        norm_eps=float(fields["layer_norm_eps"]),
    )


def write_hf_config(config: ViTConfig) -> dict[str, Any]:
    """Returns the config.json of the class that holds this tower; raises ConfigInvalid where
    transformers has none.
    """
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
                "transformers has no MLCD tower with a projection",
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
    config = _read(path)
    config = config.get("image_processor", config)
    for name, plain in (
        ("do_resize", True),
        ("do_center_crop", True),
        ("do_rescale", True),
        ("do_normalize", True),
    ):
        _expect(path, name, config.get(name, plain), plain)
    _expect(path, "resample", config.get("resample", _PIL_BICUBIC), _PIL_BICUBIC)
    factor = config.get("rescale_factor", 1 / 255)
    if not isinstance(factor, float) or not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        raise ConfigInvalid(f"{path}: rescale_factor is {factor!r}, not 1/255")
    size = config.get("size", 224)
    shortest = size.get("shortest_edge") if isinstance(size, dict) else size
    crop = config.get("crop_size", 224)
    return PreprocessSpec(
        resize_shortest=_whole(path, "size.shortest_edge", shortest),
        crop=_side(
            path,
            "crop_size",
            [crop.get("height"), crop.get("width")] if isinstance(crop, dict) else crop,
        ),
        mean=_triple(path, "image_mean", config.get("image_mean", CLIP_MEAN)),
        std=_triple(path, "image_std", config.get("image_std", CLIP_STD)),
    )


def write_hf_preprocessing(spec: PreprocessSpec) -> dict[str, Any]:
    """Returns the preprocessor_config.json for CLIPImageProcessor."""
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": spec.resize_shortest},
        "resample": _PIL_BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": spec.crop, "width": spec.crop},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(spec.mean),
        "image_std": list(spec.std),
    }


def read_open_clip_config(path: Path) -> tuple[ViTConfig, PreprocessSpec]:
    """Reads model_cfg and preprocess_cfg of the open_clip_config.json in its hub repositories."""
    config = _read(path)
    model, preprocess = config.get("model_cfg"), config.get("preprocess_cfg")
    if not isinstance(model, dict) or not isinstance(preprocess, dict):
        raise ConfigInvalid(f"{path} lacks model_cfg or preprocess_cfg")
    vision = model.get("vision_cfg", {})
    for name, plain in _PLAIN_TOWER.items():
        _expect(path, f"vision_cfg.{name}", vision.get(name, plain), plain)
    width = _whole(path, "vision_cfg.width", vision.get("width", 768))
    tower = ViTConfig(
        image_size=_side(path, "vision_cfg.image_size", vision.get("image_size", 224)),
        patch_size=_whole(path, "vision_cfg.patch_size", vision.get("patch_size", 16)),
        width=width,
        depth=_whole(path, "vision_cfg.layers", vision.get("layers", 12)),
        heads=width // _whole(path, "vision_cfg.head_width", vision.get("head_width", 64)),
        mlp_width=int(width * vision.get("mlp_ratio", 4.0)),
        embedding_dim=_whole(path, "embed_dim", model.get("embed_dim")),
        activation="quick_gelu" if model.get("quick_gelu", False) else "gelu",
    )
    for name, plain in (("interpolation", "bicubic"), ("resize_mode", "shortest"), ("mode", "RGB")):
        _expect(path, f"preprocess_cfg.{name}", preprocess.get(name, plain), plain)
    side = _side(path, "preprocess_cfg.size", preprocess.get("size", tower.image_size))
    spec = PreprocessSpec(
        resize_shortest=side,
        crop=side,
        mean=_triple(path, "preprocess_cfg.mean", preprocess.get("mean")),
        std=_triple(path, "preprocess_cfg.std", preprocess.get("std")),
    )
    return tower, spec


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactInvalid(
            f"{path} cannot be read as JSON", remedy="restore the file"
        ) from error
    if not isinstance(config, dict):
        raise ArtifactInvalid(f"{path} is no JSON object", remedy="restore the file")
    return config


def _expect(path: Path, name: str, value: object, plain: object) -> None:
    if value != plain:
        raise ConfigInvalid(f"{path}: {name} is {value!r}; only {plain!r} is supported")


def _activation(path: Path, name: object) -> Any:
    if name not in ("quick_gelu", "gelu"):
        raise ConfigInvalid(
            f"{path}: hidden_act is {name!r}", remedy="quick_gelu and gelu are known"
        )
    return name


def _whole(path: Path, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigInvalid(f"{path}: {name} is {value!r}, not a positive whole number")
    return value


def _side(path: Path, name: str, value: object) -> int:
    """Returns a square's side, given as one number or as two equal ones."""
    sides = value if isinstance(value, list | tuple) else [value]
    if len(set(sides)) != 1:
        raise ConfigInvalid(f"{path}: {name} is {value!r}; only squares are supported")
    return _whole(path, name, sides[0])


def _triple(path: Path, name: str, value: object) -> tuple[float, float, float]:
    if (
        not isinstance(value, list | tuple)
        or len(value) != 3
        or not all(isinstance(x, int | float) for x in value)
    ):
        raise ConfigInvalid(f"{path}: {name} is {value!r}, not three numbers")
    return float(value[0]), float(value[1]), float(value[2])
