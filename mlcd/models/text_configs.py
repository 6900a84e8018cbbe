"""The text towers in two-tower configs of Hugging Face and open_clip: sizes, attention, pooling.

`mlcd.models.configs` reads the image towers; its rules for defaults and unsupported values apply
here too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mlcd.errors import ConfigInvalid
from mlcd.models.blocks import Activation
from mlcd.models.config_fields import as_activation, as_size, expect
from mlcd.models.configs import hf_section, write_hf_config
from mlcd.models.json_files import read_object
from mlcd.models.text import TextConfig, TextPooling
from mlcd.models.two_towers import TwoTowers

# The defaults of CLIPTextConfig.
_CLIP_TEXT: Final[Mapping[str, Any]] = {
    "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 8, "max_position_embeddings": 77, "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5, "eos_token_id": 49407,
}  # fmt: skip
# Early configs of CLIPTextModel have this wrong eos_token_id; for it, the class pools at the
# highest id.
_WRONG_EOS: Final = 2
# The architecture that CLIPModel supports, with the keys of `_shape`.
_CLIP_SHAPE: Final[Mapping[str, object]] = {
    "image projection": True, "positions": "learned",
    "text attention": "causal", "text pooling": "end of text", "text projection": "without bias",
    "logit_bias": False,
}  # fmt: skip
_OPEN_CLIP_TEXT: Final[Mapping[str, Any]] = {
    "hf_model_name": None, "ls_init_value": None, "embed_cls": False, "proj_type": "linear",
    "final_ln_after_pool": False, "block_type": None, "qk_norm": False, "scaled_cosine_attn": False,
    "scale_heads": False, "scale_attn_inner": False, "scale_attn": False, "scale_fc": False,
}  # fmt: skip
_OPEN_CLIP_POOLING: Final[Mapping[str, TextPooling]] = {
    "argmax": "highest_id", "eos": "eos", "last": "last",
}  # fmt: skip


def read_hf_text_config(path: Path) -> TextConfig:
    """Reads the text tower in the config.json of CLIPModel."""
    config = read_object(path)
    expect(path, "model_type", config.get("model_type"), "clip")
    section = hf_section(config, "text_config")
    fields = {
        name: default if section.get(name) is None else section[name]
        for name, default in _CLIP_TEXT.items()
    }
    sizes: dict[str, Any] = {
        "vocab_size": as_size(path, "vocab_size", fields["vocab_size"]),
        "context_length": as_size(
            path, "max_position_embeddings", fields["max_position_embeddings"]
        ),
        "width": as_size(path, "hidden_size", fields["hidden_size"]),
        "depth": as_size(path, "num_hidden_layers", fields["num_hidden_layers"]),
        "heads": as_size(path, "num_attention_heads", fields["num_attention_heads"]),
        "mlp_width": as_size(path, "intermediate_size", fields["intermediate_size"]),
        "activation": as_activation(path, fields["hidden_act"]),
        "norm_eps": float(fields["layer_norm_eps"]),
    }
    eos = as_size(path, "eos_token_id", fields["eos_token_id"])
    return TextConfig(
        **sizes,
        embedding_dim=as_size(path, "projection_dim", config.get("projection_dim", 512)),
        causal=True,
        pooling="highest_id" if eos == _WRONG_EOS else "eos",
        eos_token_id=None if eos == _WRONG_EOS else eos,
    )


def write_hf_two_tower_config(towers: TwoTowers) -> dict[str, Any]:
    """Returns the config.json of CLIPModel; raises ConfigInvalid if the class does not support
    these towers.
    """
    vision = towers.vision.config
    shape = _shape(towers)
    for part, value in _CLIP_SHAPE.items():
        if shape[part] != value:
            raise ConfigInvalid(
                f"CLIPModel of transformers needs {part} {value}, got {shape[part]}"
            )
    vision_fields = write_hf_config(vision)
    del vision_fields["architectures"]
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "text_config": _write_hf_text(towers.text.config),
        "vision_config": vision_fields,
        "torch_dtype": "float32",
        "projection_dim": vision.embedding_dim,
    }


def _shape(towers: TwoTowers) -> dict[str, object]:
    vision, text = towers.vision.config, towers.text.config
    return {
        "image projection": vision.embedding_dim is not None,
        "positions": vision.positions,
        "text attention": "causal" if text.causal else "bidirectional",
        "text pooling": _hf_pooling(text),
        "text projection": "with bias" if text.projection_bias else "without bias",
        "logit_bias": towers.logit_bias is not None,
    }


def _hf_pooling(text: TextConfig) -> str:
    if text.eos_token_id == _WRONG_EOS:
        return f"at token {_WRONG_EOS}"
    return text.pooling if text.pooling == "last" else "end of text"


def _write_hf_text(text: TextConfig) -> dict[str, Any]:
    return {
        "model_type": "clip_text_model",
        "vocab_size": text.vocab_size,
        "max_position_embeddings": text.context_length,
        "hidden_size": text.width,
        "num_hidden_layers": text.depth,
        "num_attention_heads": text.heads,
        "intermediate_size": text.mlp_width,
        "hidden_act": text.activation,
        "layer_norm_eps": text.norm_eps,
        "projection_dim": text.embedding_dim,
        "eos_token_id": _WRONG_EOS if text.eos_token_id is None else text.eos_token_id,
    }


def read_open_clip_text_config(path: Path) -> TextConfig:
    """Reads text_cfg in the model_cfg of an open_clip_config.json."""
    config = read_object(path)
    model = config.get("model_cfg")
    text = model.get("text_cfg") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(text, dict):
        raise ConfigInvalid(f"{path} lacks model_cfg.text_cfg")
    for name, value in _OPEN_CLIP_TEXT.items():
        expect(path, f"text_cfg.{name}", text.get(name, value), value)
    pooling = text.get("pool_type", "argmax")
    if pooling not in _OPEN_CLIP_POOLING:
        raise ConfigInvalid(
            f"{path}: text_cfg.pool_type must be one of {', '.join(_OPEN_CLIP_POOLING)},"
            f" got {pooling!r}"
        )
    width = as_size(path, "text_cfg.width", text.get("width", 512))
    return TextConfig(
        vocab_size=as_size(path, "text_cfg.vocab_size", text.get("vocab_size", 49408)),
        context_length=as_size(path, "text_cfg.context_length", text.get("context_length", 77)),
        width=width,
        depth=as_size(path, "text_cfg.layers", text.get("layers", 12)),
        heads=as_size(path, "text_cfg.heads", text.get("heads", 8)),
        mlp_width=int(width * text.get("mlp_ratio", 4.0)),
        embedding_dim=as_size(path, "embed_dim", model.get("embed_dim")),
        activation=_open_clip_activation(path, model, text),
        causal=not text.get("no_causal_mask", False),
        pooling=_OPEN_CLIP_POOLING[pooling],
        eos_token_id=as_size(path, "text_cfg.eos_id", text.get("eos_id", 2))
        if pooling == "eos"
        else None,
        projection_bias=bool(text.get("proj_bias", False)),
        norm_eps=_open_clip_norm_eps(path, text),
    )


def _open_clip_activation(
    path: Path, model: Mapping[str, Any], text: Mapping[str, Any]
) -> Activation:
    arguments = text.get("act_kwargs") or {}
    if model.get("quick_gelu", False):
        expect(path, "text_cfg.act_kwargs", arguments, {})
        return "quick_gelu"
    if arguments == {"approximate": "tanh"}:
        return "gelu_pytorch_tanh"
    expect(path, "text_cfg.act_kwargs", arguments, {})
    return "gelu"


def _open_clip_norm_eps(path: Path, text: Mapping[str, Any]) -> float:
    arguments = text.get("norm_kwargs") or {}
    eps = float(arguments.get("eps", 1e-5))
    expect(path, "text_cfg.norm_kwargs", arguments, {"eps": eps} if arguments else {})
    return eps
