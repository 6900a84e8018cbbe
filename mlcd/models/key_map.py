"""The names of tensors: ours, and those of other projects for the same tensor.

The reference documentation prints these tables as the key map. `mlcd.models.checkpoints` describes
the layouts.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final, Literal

import torch
from torch import Tensor

from mlcd.errors import ArtifactInvalid

Layout = Literal["hf", "open_clip", "native", "ours"]
Foreign = Literal["hf", "open_clip", "native"]
Tower = Literal["vision", "text"]
State = dict[str, Tensor]

# Our name, then theirs; a name that ends in a dot means both `….weight` and `….bias`.
_HF_VISION: Final = {
    "patch.": "embeddings.patch_embedding.",
    "cls": "embeddings.class_embedding",
    "pos": "embeddings.position_embedding.weight",
    "rope.cls_angle": "class_pos_emb",
    "norm_pre.": "pre_layrnorm.",  # sic
    "norm_post.": "post_layernorm.",
    "proj.weight": "visual_projection.weight",
}
_HF_TEXT: Final = {
    "token.weight": "embeddings.token_embedding.weight",
    "pos": "embeddings.position_embedding.weight",
    "norm_post.": "final_layer_norm.",
    "proj.": "text_projection.",  # outside the tower
}
_HF_BLOCK: Final = {
    "norm1.": "layer_norm1.",
    "norm2.": "layer_norm2.",
    "attn.qkv.": "self_attn.qkv.",  # joined from, and split into, the three next tensors
    "attn.q_proj.": "self_attn.q_proj.",
    "attn.k_proj.": "self_attn.k_proj.",
    "attn.v_proj.": "self_attn.v_proj.",
    "attn.out.": "self_attn.out_proj.",
    "mlp.fc1.": "mlp.fc1.",
    "mlp.fc2.": "mlp.fc2.",
}
_OPEN_CLIP_VISION: Final = {
    "patch.weight": "conv1.weight",
    "cls": "class_embedding",
    "pos": "positional_embedding",
    "rope.cls_angle": "class_pos_emb",
    "norm_pre.": "ln_pre.",
    "norm_post.": "ln_post.",
    "proj.weight": "proj",
}
_OPEN_CLIP_TEXT: Final = {
    "token.weight": "token_embedding.weight",
    "pos": "positional_embedding",
    "norm_post.": "ln_final.",
    "proj.": "text_projection.",  # with a bias; without one it is text_projection, x @ proj
}
_OPEN_CLIP_BLOCK: Final = {
    "norm1.": "ln_1.",
    "norm2.": "ln_2.",
    "attn.qkv.weight": "attn.in_proj_weight",
    "attn.qkv.bias": "attn.in_proj_bias",
    "attn.out.": "attn.out_proj.",
    "mlp.fc1.": "mlp.c_fc.",
    "mlp.fc2.": "mlp.c_proj.",
}
_NATIVE_BLOCK: Final = {
    **_OPEN_CLIP_BLOCK,
    "attn.qkv.weight": "attn.in_proj.weight",
    "attn.qkv.bias": "attn.in_proj.bias",
}
_QKV: Final = ("q_proj", "k_proj", "v_proj")

_ROOTS: Final[Mapping[tuple[Tower, Foreign], Mapping[str, str]]] = {
    ("vision", "hf"): _HF_VISION,
    ("vision", "open_clip"): _OPEN_CLIP_VISION,
    ("vision", "native"): _OPEN_CLIP_VISION,
    ("text", "hf"): _HF_TEXT,
    ("text", "open_clip"): _OPEN_CLIP_TEXT,
}
_BLOCKS: Final[Mapping[Foreign, tuple[Mapping[str, str], str]]] = {
    "hf": (_HF_BLOCK, "encoder.layers."),
    "open_clip": (_OPEN_CLIP_BLOCK, "transformer.resblocks."),
    "native": (_NATIVE_BLOCK, "transformer.resblocks."),
}


def to_theirs(tower: Tower, layout: Foreign) -> Callable[[str], str | None]:
    """Returns a function from our name of a tensor to theirs; None for a tensor they lack."""
    block, prefix = _BLOCKS[layout]
    return _make_rename(_ROOTS[tower, layout], block, "blocks.", prefix)


def to_ours(tower: Tower, layout: Foreign) -> Callable[[str], str | None]:
    """Returns a function from their name of a tensor to ours; None for unknown names."""
    block, prefix = _BLOCKS[layout]
    return _make_rename(_invert(_ROOTS[tower, layout]), _invert(block), prefix, "blocks.")


def rename_state(state: Mapping[str, Tensor], tower: Tower, layout: Foreign, source: str) -> State:
    """Returns the tensors of one tower in our names; raises ArtifactInvalid for a tensor that does
    not belong to the tower.
    """
    rename = to_ours(tower, layout)
    ours = {}
    for name, tensor in (join_qkv(state, source) if layout == "hf" else state).items():
        renamed = rename(name)
        if renamed is None:
            raise ArtifactInvalid(f"tensor {name} in {source} does not belong to a {tower} tower")
        ours[renamed] = tensor
    return ours


def _invert(table: Mapping[str, str]) -> dict[str, str]:
    return {theirs: ours for ours, theirs in table.items()}


def _make_rename(
    root: Mapping[str, str], block: Mapping[str, str], old_prefix: str, new_prefix: str
) -> Callable[[str], str | None]:
    in_block = re.compile(re.escape(old_prefix) + r"(\d+)\.(.+)")

    def rename(name: str) -> str | None:
        if (match := in_block.fullmatch(name)) is None:
            return _rename(name, root)
        inner = _rename(match[2], block)
        return None if inner is None else f"{new_prefix}{match[1]}.{inner}"

    return rename


def _rename(name: str, table: Mapping[str, str]) -> str | None:
    if name in table:
        return table[name]
    stem, _, last = name.rpartition(".")
    if last in ("weight", "bias") and f"{stem}." in table:
        return table[f"{stem}."] + last
    return None


def join_qkv(tower: Mapping[str, Tensor], source: str) -> State:
    """Joins q_proj, k_proj and v_proj of each block into one `qkv`, in this order."""
    joined = dict(tower)
    for name in tower:
        if name.endswith((".q_proj.weight", ".q_proj.bias")):
            stem, last = name.split(".q_proj.")
            parts = []
            for part in _QKV:
                if (piece := f"{stem}.{part}.{last}") not in tower:
                    raise ArtifactInvalid(
                        f"tensor {piece} is missing from {source}", remedy="restore the file"
                    )
                parts.append(joined.pop(piece))
            joined[f"{stem}.qkv.{last}"] = torch.cat(parts)
    return joined


def split_qkv(state: Mapping[str, Tensor]) -> State:
    """Splits `qkv` of each block into q_proj, k_proj and v_proj."""
    split: State = {}
    for name, tensor in state.items():
        if not name.startswith("blocks.") or ".attn.qkv." not in name:
            split[name] = tensor
            continue
        for part, piece in zip(_QKV, tensor.chunk(3), strict=True):
            split[name.replace(".qkv.", f".{part}.")] = piece.contiguous()
    return split
