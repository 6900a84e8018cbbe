"""The translation of weights: those of other projects to our names, and ours to theirs.

Four layouts of one tower (the key map is in the reference documentation):

    hf          CLIPVisionModel(WithProjection), CLIPModel, MLCDVisionModel; with or without
                the prefix `vision_model.`
    open_clip   OpenAI's and open_clip's: the tower below `visual.` in a full model
    native      unicom's MLCD bigG: open_clip's names, but attn.in_proj.weight and class_pos_emb
    ours        the names of `mlcd.models.vit`

A state dict states neither heads nor activation nor preprocessing: these come from a config, never
from a guess.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final, Literal

import torch
from torch import Tensor

from mlcd.errors import ArtifactInvalid

Layout = Literal["hf", "open_clip", "native", "ours"]
State = dict[str, Tensor]

_WRAPPERS: Final = re.compile(r"^(?:module\.|_orig_mod\.)+")
_NOT_THE_TOWER: Final = (
    # a full CLIP in Hugging Face's layout
    "text_model.", "text_projection", "logit_scale", "logit_bias",
    # a buffer that old files hold
    "vision_model.embeddings.position_ids", "embeddings.position_ids",
)  # fmt: skip

# Our name, then theirs; a name that ends in a dot stands for weight and bias.
_HF_ROOT: Final = {
    "patch.weight": "embeddings.patch_embedding.weight",
    "cls": "embeddings.class_embedding",
    "pos": "embeddings.position_embedding.weight",
    "rope.cls_angle": "class_pos_emb",
    "norm_pre.": "pre_layrnorm.",  # sic
    "norm_post.": "post_layernorm.",
    "proj.weight": "visual_projection.weight",
}
_HF_BLOCK: Final = {
    "norm1.": "layer_norm1.",
    "norm2.": "layer_norm2.",
    "attn.qkv.": "self_attn.qkv.",  # joined from, and split into, the three that follow
    "attn.q_proj.": "self_attn.q_proj.",
    "attn.k_proj.": "self_attn.k_proj.",
    "attn.v_proj.": "self_attn.v_proj.",
    "attn.out.": "self_attn.out_proj.",
    "mlp.fc1.": "mlp.fc1.",
    "mlp.fc2.": "mlp.fc2.",
}
_OPEN_CLIP_ROOT: Final = {
    "patch.weight": "conv1.weight",
    "cls": "class_embedding",
    "pos": "positional_embedding",
    "rope.cls_angle": "class_pos_emb",
    "norm_pre.": "ln_pre.",
    "norm_post.": "ln_post.",
    "proj.weight": "proj",
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


def read_state(state: Mapping[str, Tensor], source: str) -> tuple[Layout, State]:
    """Returns the layout of a file's tensors, and the vision tower among them in our names.

    Tensors of a text tower are left out; any other that has no equivalent raises ArtifactInvalid
    naming it and `source`.
    """
    tower = _vision_tower({_WRAPPERS.sub("", name): tensor for name, tensor in state.items()})
    layout = _layout(tower, source)
    if layout == "ours":
        return layout, tower
    if layout == "hf":
        tower = _joined_qkv(tower, source)
    rename = _renaming(_tables(layout, inverse=True))
    ours = {}
    for name, tensor in tower.items():
        renamed = rename(name)
        if renamed is None:
            raise ArtifactInvalid(f"tensor {name} in {source} has no place in a vision tower")
        ours[renamed] = tensor
    if layout != "hf" and "proj.weight" in ours:
        ours["proj.weight"] = ours["proj.weight"].T.contiguous()  # theirs is x @ proj
    if "rope.cls_angle" in ours:
        ours.pop("pos", None)  # a table that rotary towers carry and do not use
    return layout, ours


def write_state(state: Mapping[str, Tensor], layout: Layout) -> State:
    """Returns our tensors in another layout's names; hf has the prefix that transformers 4 and 5
    both read.
    """
    if layout == "ours":
        return dict(state)
    state = dict(state)
    if layout == "hf":
        state = _split_qkv(state)
    elif "proj.weight" in state:
        state["proj.weight"] = state["proj.weight"].T.contiguous()
    rename = _renaming(_tables(layout, inverse=False))
    theirs = {}
    for name, tensor in state.items():
        renamed = rename(name)
        assert renamed is not None, name
        prefixed = layout == "hf" and renamed != _HF_ROOT["proj.weight"]
        theirs[f"vision_model.{renamed}" if prefixed else renamed] = tensor
    return theirs


def name_in(layout: Layout, name: str) -> str:
    """Returns the name of our tensor in a file of this layout, without the prefix of a
    full model.
    """
    if layout == "ours":
        return name
    return _renaming(_tables(layout, inverse=False))(name) or name


def _vision_tower(state: State) -> State:
    """Returns the tower alone, without its prefix.

    In a full CLIP the root's positional_embedding is that of the text tower.
    """
    if any(name.startswith("visual.") for name in state):
        return {
            name.removeprefix("visual."): tensor
            for name, tensor in state.items()
            if name.startswith("visual.")
        }
    kept = {name: tensor for name, tensor in state.items() if not name.startswith(_NOT_THE_TOWER)}
    return {name.removeprefix("vision_model."): tensor for name, tensor in kept.items()}


def _layout(tower: State, source: str) -> Layout:
    if "patch.weight" in tower:
        return "ours"
    if "embeddings.patch_embedding.weight" in tower:
        return "hf"
    if "conv1.weight" in tower:
        return (
            "native" if any(name.endswith("attn.in_proj.weight") for name in tower) else "open_clip"
        )
    if "patch_embed.proj.weight" in tower:
        raise ArtifactInvalid(
            f"{source} holds a timm or UNICOM (2023) tower, whose architecture is another",
            remedy="give a CLIP or MLCD tower",
        )
    shown = ", ".join(sorted(tower)[:3]) or "none"
    raise ArtifactInvalid(
        f"{source} holds no vision tower that we know; its tensors: {shown}",
        remedy="give a checkpoint of MLCD, CLIP or open_clip",
    )


def _tables(layout: Layout, *, inverse: bool) -> tuple[dict[str, str], dict[str, str], str, str]:
    """Returns the names at the root, the names in a block, and the blocks' prefixes.

    They lead from ours to theirs, or back where inverse.
    """
    tables = {
        "hf": (_HF_ROOT, _HF_BLOCK, "encoder.layers."),
        "open_clip": (_OPEN_CLIP_ROOT, _OPEN_CLIP_BLOCK, "transformer.resblocks."),
        "native": (_OPEN_CLIP_ROOT, _NATIVE_BLOCK, "transformer.resblocks."),
    }
    root, block, prefix = tables[layout]
    if not inverse:
        return root, block, "blocks.", prefix
    return (
        {theirs: ours for ours, theirs in root.items()},
        {b: a for a, b in block.items()},
        prefix,
        "blocks.",
    )


def _renaming(
    tables: tuple[dict[str, str], dict[str, str], str, str],
) -> Callable[[str], str | None]:
    root, block, old_prefix, new_prefix = tables
    in_block = re.compile(re.escape(old_prefix) + r"(\d+)\.(.+)")

    def rename(name: str) -> str | None:
        if (match := in_block.fullmatch(name)) is None:
            return _renamed(name, root)
        inner = _renamed(match[2], block)
        return None if inner is None else f"{new_prefix}{match[1]}.{inner}"

    return rename


def _renamed(name: str, table: Mapping[str, str]) -> str | None:
    if name in table:
        return table[name]
    stem, _, last = name.rpartition(".")
    if last in ("weight", "bias") and f"{stem}." in table:
        return table[f"{stem}."] + last
    return None


def _joined_qkv(tower: State, source: str) -> State:
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


def _split_qkv(state: State) -> State:
    split: State = {}
    for name, tensor in state.items():
        if ".attn.qkv." not in name:
            split[name] = tensor
            continue
        for part, piece in zip(_QKV, tensor.chunk(3), strict=True):
            split[name.replace(".qkv.", f".{part}.")] = piece.contiguous()
    return split
