"""Translates weights from other projects' names of tensors to ours, and back.

Four layouts of one tower (the key map is in the reference documentation):

    hf          CLIPVisionModel(WithProjection), CLIPModel, MLCDVisionModel; with or without the
                prefix `vision_model.`
    open_clip   OpenAI's and open_clip's: the tower below `visual.` in a full model
    native      unicom's MLCD bigG: open_clip's names, but attn.in_proj.weight and class_pos_emb
    ours        the names of `mlcd.models.vit`

A state dict has neither the number of heads nor the activation nor the preprocessing: these come
from a config and are never guessed.
"""

import re
from collections.abc import Mapping
from typing import Final

from torch import Tensor

from mlcd.errors import ArtifactInvalid
from mlcd.models.key_map import Layout, State, rename_state, split_qkv, to_theirs

_WRAPPERS: Final = re.compile(r"^(?:module\.|_orig_mod\.)+")
_OUTSIDE_THE_TOWER: Final = (
    # a full CLIP in Hugging Face's layout
    "text_model.", "text_projection", "logit_scale",
    # a buffer in old files
    "vision_model.embeddings.position_ids", "embeddings.position_ids",
)  # fmt: skip


def read_state(state: Mapping[str, Tensor], source: str) -> tuple[Layout, State]:
    """Returns the layout of a file's tensors, and its vision tower in our names.

    Tensors of a text tower are left out; any other tensor without an equivalent raises
    ArtifactInvalid, which names the tensor and `source`.
    """
    tower = _vision_tower(strip_wrappers(state))
    layout = _layout(tower, source)
    if layout == "ours":
        return layout, tower
    ours = rename_state(tower, "vision", layout, source)
    if layout != "hf" and "proj.weight" in ours:
        ours["proj.weight"] = ours["proj.weight"].T.contiguous()  # theirs is x @ proj
    if "rope.cls_angle" in ours:
        ours.pop("pos", None)  # rotary towers have this table and do not use it
    return layout, ours


def write_state(state: Mapping[str, Tensor], layout: Layout) -> State:
    """Returns our tensors in another layout's names; for hf with `vision_model.`, the prefix that
    transformers 4 and 5 both read.
    """
    if layout == "ours":
        return dict(state)
    state = dict(state)
    if layout == "hf":
        state = split_qkv(state)
    elif "proj.weight" in state:
        state["proj.weight"] = state["proj.weight"].T.contiguous()
    rename = to_theirs("vision", layout)
    theirs = {}
    for name, tensor in state.items():
        renamed = rename(name)
        assert renamed is not None, name
        prefixed = layout == "hf" and name != "proj.weight"
        theirs[f"vision_model.{renamed}" if prefixed else renamed] = tensor
    return theirs


def strip_wrappers(state: Mapping[str, Tensor]) -> State:
    """Returns the tensors without the prefixes that DDP and torch.compile add to a name."""
    return {_WRAPPERS.sub("", name): tensor for name, tensor in state.items()}


def name_in(layout: Layout, name: str) -> str:
    """Returns the name of our tensor in this layout, without the prefix of a full model."""
    if layout == "ours":
        return name
    return to_theirs("vision", layout)(name) or name


def _vision_tower(state: State) -> State:
    """Returns only the tensors of the tower, without their prefix.

    In a full CLIP, positional_embedding at the root belongs to the text tower.
    """
    if any(name.startswith("visual.") for name in state):
        return {
            name.removeprefix("visual."): tensor
            for name, tensor in state.items()
            if name.startswith("visual.")
        }
    vision = {
        name: tensor for name, tensor in state.items() if not name.startswith(_OUTSIDE_THE_TOWER)
    }
    return {name.removeprefix("vision_model."): tensor for name, tensor in vision.items()}


def _layout(tower: State, source: str) -> Layout:
    if "patch.weight" in tower:
        return "ours"
    if "embeddings.patch_embedding.weight" in tower:
        return "hf"
    if "conv1.weight" in tower:
        return (
            "native" if any(name.endswith("attn.in_proj.weight") for name in tower) else "open_clip"
        )
    if any(name.endswith("patch_embed.proj.weight") for name in tower):
        raise ArtifactInvalid(
            f"{source} holds a timm or UNICOM (2023) tower, an architecture without support",
            remedy="export timm's directory with --with timm, or give a CLIP or MLCD tower",
        )
    shown = ", ".join(sorted(tower)[:3]) or "none"
    raise ArtifactInvalid(
        f"{source} must hold a vision tower of a known layout, got the tensors {shown}",
        remedy="give a checkpoint of MLCD, CLIP or open_clip, or a directory that a library reads",
    )
