"""Exports models that a library reads, from its own class traced into a graph.

The model artifact has graphs without weights of ours: no training starts from it, and OpenVINO or
Triton runs it.
"""

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Artifact, Request
from mlcd.errors import ArtifactInvalid, ConfigInvalid
from mlcd.export.graph import ONNX, write_image_graph
from mlcd.export.parity import CAPTIONS, check_parity, check_text_parity
from mlcd.export.text_tower import text_facts, write_text_onnx
from mlcd.images.transform import PreprocessSpec
from mlcd.models.servable import PREPROCESS
from mlcd.models.text_part import FOLDER, GRAPH, TextSettings, digest_of_both
from mlcd.models.tokenizer import Tokenizer
from mlcd.models.weight_files import weights_in
from mlcd.models.zoo import LoadOptions
from mlcd.progress import Reporter

# the inverse temperature that CLIP starts training from, for models without one of their own
DEFAULT_SCALE: Final = 1 / 0.07
# increased with every code change that changes an embedding
_REVISION: Final = 1
_SAME_COSINE: Final = 0.99999


class TracedImages(nn.Module):
    """A library's image tower, from uint8 [B, 3, S, S] RGB to unit rows, float32 [B, D].

    tower: from normalized float32 [B, 3, S, S] to one row per image.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, tower: nn.Module, preprocess: PreprocessSpec) -> None:
        super().__init__()
        self.tower = tower
        self.preprocess = preprocess
        mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in (preprocess.mean, preprocess.std))
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    def forward(self, image_u8: Tensor) -> Tensor:
        pixels = (image_u8.float() / 255.0 - self.mean) / self.std
        return functional.normalize(self.tower(pixels).float(), dim=1)


class TracedTexts(nn.Module):
    """A library's text tower, from int64 [N, T] to unit rows, float32 [N, D].

    tower: from ids, and from a mask of the tokens that are not padding if `masks_padding`, to one
    row per text.
    """

    def __init__(
        self, tower: nn.Module, tokenizer: Tokenizer, settings: TextSettings, *, masks_padding: bool
    ) -> None:
        super().__init__()
        self.tower = tower
        self.tokenizer = tokenizer
        self.settings = settings
        self.masks_padding = masks_padding

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids != self.settings.pad_id).long() if self.masks_padding else None
        return functional.normalize(self.tower(ids, mask).float(), dim=1)


@dataclass(frozen=True)
class TracedModel:
    """A model as a library reads it.

    images: the module to trace. reference: the library's own class as it is, for the check of
    parity; it may be `images`. facts: what the manifest says of the library and the class.
    """

    images: TracedImages
    reference: TracedImages
    texts: TracedTexts | None
    facts: dict[str, Any]


def build_texts(
    tower: nn.Module,
    tokenizer: Tokenizer,
    expected: Tensor,
    *,
    logit_scale: float | None,
    logit_bias: float | None,
) -> TracedTexts:
    """Returns a text tower with the treatment of padding that gives the expected rows.

    expected: unit rows of the library for the captions of the parity check, [N, D]. Padding is
    masked only if the rows need it, and trimmed where they do not change without it. Raises
    ArtifactInvalid if neither gives the expected rows.
    """
    ids = torch.from_numpy(tokenizer(CAPTIONS.read_text(encoding="utf-8").splitlines()))
    settings = TextSettings(
        tower="traced",
        context_length=tokenizer.context_length,
        pad_id=tokenizer.pad_id,
        trims_padding=False,
        dimension=expected.shape[1],
        logit_scale=math.log(DEFAULT_SCALE) if logit_scale is None else logit_scale,
        logit_bias=logit_bias,
    )
    for masks_padding in (False, True):
        texts = TracedTexts(tower, tokenizer, settings, masks_padding=masks_padding).eval()
        with torch.inference_mode():
            if _min_cosine(texts(ids), expected) >= _SAME_COSINE:
                texts.settings = settings.model_copy(
                    update={"trims_padding": _is_trimmable(texts, ids, expected)}
                )
                return texts
    raise ArtifactInvalid(
        "the text tower gives other rows than the library with its own tokenizer",
        remedy="omit the text tower with --no-text",
    )


def _is_trimmable(texts: TracedTexts, ids: Tensor, expected: Tensor) -> bool:
    """Tells whether every caption has the same row without padding on the right."""
    if not texts.tokenizer.pads_right:
        return False
    kept = int(texts.tokenizer.ends_with_padding)
    for row, target in zip(ids, expected, strict=True):
        is_text = (row != texts.settings.pad_id).nonzero()
        length = int(is_text[-1]) + 1 + kept if len(is_text) else 1
        if _min_cosine(texts(row[None, :length]), target[None]) < _SAME_COSINE:
            return False
    return True


def _min_cosine(rows: Tensor, expected: Tensor) -> float:
    return float((rows.double() * expected.double()).sum(dim=1).min())


def require_safetensors(folder: Path) -> Path:
    """Returns the weights in a directory; raises ConfigInvalid unless they are safetensors."""
    weights = weights_in(folder)
    if "safetensors" not in weights.name:
        raise ConfigInvalid(
            f"weights for a library must be in model.safetensors, got {weights}",
            remedy="save the model again with safetensors",
        )
    return weights


def check_finite(model: nn.Module, source: Path) -> None:
    """Raises ArtifactInvalid, naming the tensor, for weights that are not finite."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ArtifactInvalid(
                f"tensor {name} in {source} must be finite", remedy="restore the file"
            )


def find_row_length(tower: nn.Module, side: int, source: Path) -> int:
    """Returns the dimension of a tower's rows; raises ConfigInvalid unless it gives one row per
    image of this side.
    """
    try:
        with torch.inference_mode():
            rows: Any = tower(torch.zeros(2, 3, side, side))
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigInvalid(
            f"the model in {source} cannot embed images of {side} x {side} pixels: {reason[0]}",
            remedy="choose another size with --image-size",
        ) from error
    if not isinstance(rows, Tensor) or rows.dim() != 2 or len(rows) != 2:
        raise ConfigInvalid(
            f"the model in {source} must give one row per image",
            remedy="choose the pooling with --pooling cls, mean, map or last",
        )
    return rows.shape[1]


def resize_spec(preprocess: PreprocessSpec, options: LoadOptions) -> PreprocessSpec:
    """Returns the preprocessing with the image size and orientation policy of the options."""
    if options.exif is not None:
        preprocess = replace(preprocess, exif=options.exif)
    size = options.image_size
    if size in (None, preprocess.crop):
        return preprocess
    shortest = round(preprocess.resize_shortest * size / preprocess.crop)
    return replace(preprocess, crop=size, resize_shortest=shortest)


def export_traced(
    model: TracedModel,
    out: Path,
    request: Request,
    *,
    images: str | None,
    reporter: Reporter,
) -> Artifact:
    """Writes the model artifact: graph, preprocessing and the text part, if there is one.

    request: its parent identifies the weights. Raises ArtifactInvalid, and publishes nothing, if
    the cosine of an image or a caption with the library's class is below 0.9999.
    """
    name, preprocess = request.config["name"], model.images.preprocess
    with Draft(out, request) as draft, reporter.stage("export", None) as meter:
        with draft.write(PREPROCESS) as path:
            path.write_text(preprocess.to_json())
        with draft.write(ONNX) as path:
            write_image_graph(model.images, preprocess.crop, path)
        meter.advance(1)
        parity = check_parity(model.reference, draft.path / ONNX, images, name)
        meter.advance(1, cosine=parity.min_cosine)
        digest = _digest_source(request, "images")
        facts = {**parity.summary(), **model.facts}
        if model.texts is not None:
            (part := draft.path / FOLDER).mkdir(exist_ok=True)
            model.texts.settings.write(part)
            model.texts.tokenizer.write(part)
            write_text_onnx(model.texts, model.texts.tokenizer.context_length, part / GRAPH)
            text_parity = check_text_parity(model.texts, part / GRAPH, name)
            meter.advance(1, text_cosine=text_parity.min_cosine)
            facts |= text_facts(text_parity)
            digest = digest_of_both(digest, _digest_source(request, "texts"))
        with torch.inference_mode():
            side = preprocess.crop
            dimension = model.images(torch.zeros(1, 3, side, side, dtype=torch.uint8)).shape[1]
        return draft.publish(
            fingerprint=preprocess.fingerprint(digest),
            summary={**facts, "dimension": dimension, "weights_digest": digest},
        )


def _digest_source(request: Request, tower: str) -> str:
    """Returns the digest of a tower, from its files and the options that change its rows.

    The bytes of the graph do not count: they depend on the version of the exporter.
    """
    (parent,) = request.parents
    options = {key: value for key, value in request.config.items() if key not in ("name", "exif")}
    content = f"{tower} traced {_REVISION} {parent.digest} {sorted(options.items())}"
    return hashlib.sha256(content.encode()).hexdigest()
