"""Translates two-tower weights from other projects' names of tensors to ours, and back.

clip        Hugging Face's CLIPModel
open_clip   OpenAI's and open_clip's, the text tower at the root or below `text.`
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from torch import Tensor

from mlcd.errors import ArtifactInvalid
from mlcd.models.checkpoints import read_state, strip_wrappers, write_state
from mlcd.models.key_map import Foreign, State, rename_state, split_qkv, to_theirs
from mlcd.models.two_towers import TwoTowers

Family = Literal["clip", "open_clip"]

_CLIP_PROJECTION: Final = "text_projection.weight"
_NOT_WEIGHTS: Final = (
    "input_resolution", "context_length", "vocab_size",  # numbers in OpenAI's files
    "text_model.embeddings.position_ids", "attn_mask",  # buffers in old files
)  # fmt: skip


@dataclass(frozen=True)
class TwoTowerState:
    """The tensors of both towers in our names, and the two scalars of the logits."""

    family: Family
    vision: State
    text: State
    logit_scale: Tensor
    logit_bias: Tensor | None

    def vision_name(self, name: str) -> str:
        """Returns the name of our tensor in the file, without its prefix."""
        return to_theirs("vision", _layout(self.family))(name) or name

    def text_name(self, name: str) -> str:
        """Returns the name of our tensor in the file, without its prefix."""
        return to_theirs("text", _layout(self.family))(name) or name


def read_two_tower_state(state: Mapping[str, Tensor], source: str) -> TwoTowerState:
    """Returns the tensors of both towers in our names.

    Raises ArtifactInvalid naming `source`, and the tensor that is missing or unknown.
    """
    state = {
        name: tensor for name, tensor in strip_wrappers(state).items() if name not in _NOT_WEIGHTS
    }
    family = _family(state, source)
    text = _open_clip_text(state) if family == "open_clip" else _hf_text(state)
    if "logit_scale" not in state:
        raise ArtifactInvalid(
            f"tensor logit_scale is missing from {source}", remedy="restore the file"
        )
    return TwoTowerState(
        family=family,
        vision=read_state(state, source)[1],
        text=rename_state(text, "text", _layout(family), source),
        logit_scale=state["logit_scale"],
        # of open_clip, if the model was trained with SigLIP's loss
        logit_bias=state.get("logit_bias"),
    )


def write_two_tower_state(towers: TwoTowers, family: Family) -> State:
    """Returns the tensors in the names of another project's two-tower model."""
    layout = _layout(family)
    vision = write_state(towers.vision.state_dict(), layout)
    text = _write_text(towers.text.state_dict(), layout)
    scalars = {"logit_scale": towers.logit_scale.detach()}
    if towers.logit_bias is not None:
        scalars["logit_bias"] = towers.logit_bias.detach()
    if family == "open_clip":
        # only open_clip's custom text towers have a projection with bias; their names have a prefix
        prefix = "text." if "text_projection.bias" in text else ""
        return (
            {f"visual.{name}": tensor for name, tensor in vision.items()}
            | {f"{prefix}{name}": tensor for name, tensor in text.items()}
            | scalars
        )
    text[_CLIP_PROJECTION] = text.pop(f"text_model.{_CLIP_PROJECTION}")
    return vision | text | scalars


def _layout(family: Family) -> Foreign:
    return "open_clip" if family == "open_clip" else "hf"


def _family(state: State, source: str) -> Family:
    if any(name.startswith("visual.") for name in state):
        return "open_clip"
    if _CLIP_PROJECTION in state:
        return "clip"
    raise ArtifactInvalid(
        f"{source} must hold the two towers of a known layout",
        remedy="give a CLIPModel of transformers, or a CLIP of OpenAI or open_clip",
    )


def _hf_text(state: State) -> State:
    text = _select_prefixed(state, "text_model.")
    text[_CLIP_PROJECTION] = state[_CLIP_PROJECTION]
    return text


def _open_clip_text(state: State) -> State:
    text = _select_prefixed(state, "text.") or {
        name: tensor for name, tensor in state.items() if not name.startswith(("visual.", "logit_"))
    }
    if "text_projection" in text:
        text["text_projection.weight"] = text.pop("text_projection").T.contiguous()
    return text


def _write_text(state: State, layout: Foreign) -> State:
    rename = to_theirs("text", layout)
    theirs = {}
    for name, tensor in (split_qkv(state) if layout == "hf" else state).items():
        renamed = rename(name)
        assert renamed is not None, name
        theirs[f"text_model.{renamed}" if layout == "hf" else renamed] = tensor
    if layout == "open_clip" and "proj.bias" not in state:
        projection = theirs.pop("text_projection.weight")
        theirs["text_projection"] = projection.T.contiguous()
    return theirs


def _select_prefixed(state: State, prefix: str) -> State:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in state.items()
        if name.startswith(prefix)
    }
