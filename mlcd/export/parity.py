"""Checks the parity of an export: compares a graph with its model on real images and captions
before publishing.

The graph runs in the engine of this machine. If this CPU does not compute a half precision, the
model emulates it: the graph in float32 is compared with the model with rounded weights and
activations.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.func import functional_call

from mlcd.encoders.encoder import Precision
from mlcd.encoders.local_text import TextPart
from mlcd.encoders.openvino import OpenVinoEncoder, computes_bf16, open_text, read_onnx
from mlcd.encoders.options import EncoderOptions
from mlcd.errors import ArtifactInvalid, ImageRejected, InvalidInput
from mlcd.images.sources import open_source
from mlcd.images.transform import PreprocessSpec
from mlcd.models.rope import RotaryPositions
from mlcd.models.servable import Servable
from mlcd.models.servable_text import ServableText
from mlcd.models.text_part import TextSettings
from mlcd.models.tokenizer import Tokenizer
from mlcd.types import ImageBatch

# the precision in which the exported graph will run, perhaps on another machine
GraphPrecision: TypeAlias = Literal["fp32", "fp16", "bf16"]

MIN_COSINE: Final[dict[GraphPrecision, float]] = {"fp32": 0.9999, "fp16": 0.999, "bf16": 0.999}
_HALF: Final[dict[GraphPrecision, torch.dtype]] = {"fp16": torch.float16, "bf16": torch.bfloat16}
_NUM_IMAGES: Final = 64
CAPTIONS: Final = Path(__file__).with_name("captions.txt")


class ImageModel(Protocol):
    """A model from uint8 [B, 3, S, S] to unit rows."""

    @property
    def preprocess(self) -> PreprocessSpec: ...
    def __call__(self, image_u8: Tensor, /) -> Tensor: ...


class TextModel(Protocol):
    """A model from ids, int64 [N, T], to unit rows."""

    @property
    def settings(self) -> TextSettings: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    def __call__(self, ids: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class Parity:
    """The measured parity.

    min_cosine: lowest cosine over the `num` images or captions. source: origin of the images or
    captions. measured: precision of the measurement, and how it was computed.
    """

    min_cosine: float
    num: int
    source: str
    measured: str

    def summary(self) -> dict[str, Any]:
        """Returns the fields for the manifest."""
        return {
            "parity_min_cosine": self.min_cosine,
            "parity_images": self.num,
            "parity_source": self.source,
            "parity_measured": self.measured,
        }


def check_parity(
    model: ImageModel,
    path: Path,
    images: str | None,
    name: str,
    *,
    precision: GraphPrecision = "fp32",
) -> Parity:
    """Compares the graph at `path`, which is to run in `precision`, with the model in float32.

    Raises ArtifactInvalid if the cosine of an image is below MIN_COSINE.
    """
    batch, source = _parity_images(model, images)

    def serve(precision: Precision) -> NDArray[np.float32]:
        return _run_graph(model, path, batch, name, precision)

    return _compare(
        model, torch.from_numpy(batch), serve, precision, f"an image of {source}", source
    )


def check_text_parity(
    model: TextModel, path: Path, name: str, *, precision: GraphPrecision = "fp32"
) -> Parity:
    """Compares the graph of a text tower with the tower on captions, from one token to more than
    the context length.

    The graph gets a single caption, and batches of similar length without unneeded padding; the
    tower gets padded captions. Raises the errors of `check_parity`.
    """
    ids = model.tokenizer(CAPTIONS.read_text(encoding="utf-8").splitlines())

    def serve(precision: Precision) -> NDArray[np.float32]:
        part = TextPart(name, "", path.parent, model.settings, model.tokenizer)
        encoder = open_text(part, EncoderOptions(precision=precision))
        try:
            return np.concatenate([encoder.encode(ids[:1]), encoder.encode(ids[1:])])
        finally:
            encoder.close()

    return _compare(model, torch.from_numpy(ids), serve, precision, "a caption", "captions")


def _compare(
    model: ImageModel | TextModel,
    batch: Tensor,
    serve: Callable[[Precision], NDArray[np.float32]],
    precision: GraphPrecision,
    item: str,
    source: str,
) -> Parity:
    """Compares the rows of the graph in a precision with the rows of the model."""
    if precision == "fp32" or (precision == "bf16" and computes_bf16()):
        rows, expected = serve(precision), _run_model(model, batch)
        measured = f"{precision} by OpenVINO"
    else:
        assert isinstance(model, Servable | ServableText)
        rows, expected = serve("fp32"), _round_and_compute(model, batch, _HALF[precision])
        measured = f"emulated {precision}: weights and activations rounded"
    min_cosine = float((rows.astype(np.float64) * expected.astype(np.float64)).sum(axis=1).min())
    if not min_cosine >= MIN_COSINE[precision]:
        raise ArtifactInvalid(
            f"the exported model differs from the trained one: cosine {min_cosine:.6f} on {item},"
            f" below {MIN_COSINE[precision]} ({measured})",
            remedy="nothing was exported; report this with the versions that `pip freeze` prints",
        )
    return Parity(min_cosine, len(batch), source, measured)


def _run_graph(
    model: ImageModel, path: Path, batch: ImageBatch, name: str, precision: Precision
) -> NDArray[np.float32]:
    encoder = OpenVinoEncoder(
        read_onnx(path), name=name, fingerprint="", preprocess=model.preprocess, precision=precision
    )
    try:
        return np.concatenate([encoder.encode(batch[:1]), encoder.encode(batch[1:])])
    finally:
        encoder.close()


def _run_model(model: ImageModel | TextModel, batch: Tensor) -> NDArray[np.float32]:
    with torch.inference_mode():
        rows: NDArray[np.float32] = model(batch).numpy()
        return rows


def _round_and_compute(
    model: Servable | ServableText, batch: Tensor, dtype: torch.dtype
) -> NDArray[np.float32]:
    """Computes the model as an engine in half precision would: weights and activations are rounded,
    but sums and the normalization are in float32.

    Without half-precision instructions, a CPU would be a hundred times slower in the dtype itself.
    """
    with torch.inference_mode(), _rounding_activations(model.trunk, dtype):
        weights = {
            f"trunk.{name}": tensor if "rope" in name.split(".") else _round(tensor, dtype)
            for name, tensor in model.trunk.named_parameters()
        }
        rows: NDArray[np.float32] = functional_call(model, weights, batch).numpy()
        return rows


@contextmanager
def _rounding_activations(trunk: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Rounds the inputs and outputs of layers, except those of rotary positions."""

    def round_inputs(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            _round(value, dtype)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for value in inputs
        )

    def round_output(_: nn.Module, __: tuple[Any, ...], result: Tensor) -> Tensor:
        return _round(result, dtype)

    with ExitStack() as hooks:
        for module in trunk.modules():
            if not isinstance(module, RotaryPositions):
                hooks.callback(module.register_forward_pre_hook(round_inputs).remove)
                hooks.callback(module.register_forward_hook(round_output).remove)
        yield


def _round(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).to(tensor.dtype)


def load_photographs() -> Sequence[NDArray[np.uint8]]:
    """Returns scikit-learn's two photographs, uint8 [H, W, 3]."""
    from sklearn.datasets import load_sample_images

    pictures: Sequence[NDArray[np.uint8]] = load_sample_images().images
    return pictures


def _parity_images(model: ImageModel, images: str | None) -> tuple[ImageBatch, str]:
    if images is None:
        return np.stack(
            [model.preprocess.apply(Image.fromarray(picture)) for picture in load_photographs()]
        ), "scikit-learn"
    source = open_source(images)
    prepared: list[np.ndarray] = []
    for entry in source.entries[:: max(1, len(source.entries) // _NUM_IMAGES)]:
        try:
            prepared.append(model.preprocess.prepare(source.read(entry)))
        except ImageRejected:
            continue
    if not prepared:
        raise InvalidInput(
            f"no image of {images} can be decoded", remedy="give other images with --images"
        )
    return np.stack(prepared[:_NUM_IMAGES]), images
