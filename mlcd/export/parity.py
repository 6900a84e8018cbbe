"""The parity gate of an export, which compares a graph with its model on real images and captions
before it is published.

The graph runs in the engine of this machine. Half precision that this CPU does not compute is
emulated on the other side: the graph in float32 is compared with the model whose weights and
activations are rounded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

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
from mlcd.models.rope import RotaryPositions
from mlcd.models.servable import Servable
from mlcd.models.servable_text import ServableText
from mlcd.types import ImageBatch

# the precision in which the exported graph will be computed, on whatever machine
GraphPrecision: TypeAlias = Literal["fp32", "fp16", "bf16"]

MIN_COSINE: Final[dict[GraphPrecision, float]] = {"fp32": 0.9999, "fp16": 0.999, "bf16": 0.999}
_HALF: Final[dict[GraphPrecision, torch.dtype]] = {"fp16": torch.float16, "bf16": torch.bfloat16}
_NUM_IMAGES: Final = 64
CAPTIONS: Final = Path(__file__).with_name("captions.txt")


@dataclass(frozen=True)
class Parity:
    """The measured parity.

    min_cosine: the worst agreement over the `num` images or captions. source: where they came from.
    measured: the precision of the measurement.
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
    model: Servable,
    path: Path,
    images: str | None,
    name: str,
    *,
    precision: GraphPrecision = "fp32",
) -> Parity:
    """Compares the graph at `path`, meant to run in `precision`, with the model in float32.

    Raises ArtifactInvalid where the cosine of an image is below MIN_COSINE.
    """
    batch, source = _parity_images(model, images)

    def serve(precision: Precision) -> NDArray[np.float32]:
        return _graph_rows(model, path, batch, name, precision)

    return _compare(
        model, torch.from_numpy(batch), serve, precision, f"an image of {source}", source
    )


def check_text_parity(
    model: ServableText, path: Path, name: str, *, precision: GraphPrecision = "fp32"
) -> Parity:
    """Compares the graph of a text tower with the tower on captions, from one token to more than
    the context holds.

    The graph gets them one by one and in batches by length, without the padding that it can do
    without; the tower gets them padded. Raises what `check_parity` raises.
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
    model: Servable | ServableText,
    batch: Tensor,
    serve: Callable[[Precision], NDArray[np.float32]],
    precision: GraphPrecision,
    item: str,
    source: str,
) -> Parity:
    """Compares the rows that are served in a precision with those of the model."""
    if precision == "fp32" or (precision == "bf16" and computes_bf16()):
        rows, expected = serve(precision), _model_rows(model, batch)
        measured = f"{precision} by OpenVINO"
    else:
        rows, expected = serve("fp32"), _round_and_compute(model, batch, _HALF[precision])
        measured = f"emulated {precision}: weights and activations rounded"
    worst = float((rows.astype(np.float64) * expected.astype(np.float64)).sum(axis=1).min())
    if not worst >= MIN_COSINE[precision]:
        raise ArtifactInvalid(
            f"the exported model differs from the trained one: cosine {worst:.6f} on {item},"
            f" below {MIN_COSINE[precision]} ({measured})",
            remedy="nothing was exported; report this with the versions that `pip freeze` prints",
        )
    return Parity(worst, len(batch), source, measured)


def _graph_rows(
    model: Servable, path: Path, batch: ImageBatch, name: str, precision: Precision
) -> NDArray[np.float32]:
    encoder = OpenVinoEncoder(
        read_onnx(path), name=name, fingerprint="", preprocess=model.preprocess, precision=precision
    )
    try:
        return np.concatenate([encoder.encode(batch[:1]), encoder.encode(batch[1:])])
    finally:
        encoder.close()


def _model_rows(model: nn.Module, batch: Tensor) -> NDArray[np.float32]:
    with torch.inference_mode():
        rows: NDArray[np.float32] = model(batch).numpy()
        return rows


def _round_and_compute(
    model: Servable | ServableText, batch: Tensor, dtype: torch.dtype
) -> NDArray[np.float32]:
    """Computes the model as an engine of half precision does: rounded numbers, but sums and the
    unit length in float32.

    A CPU without the instructions would compute in the dtype itself a hundred times slower.
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
    """Rounds the inputs and outputs of layers, and never the angles of positions."""

    def of_input(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            _round(value, dtype)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for value in inputs
        )

    def of_output(_: nn.Module, __: tuple[Any, ...], result: Tensor) -> Tensor:
        return _round(result, dtype)

    with ExitStack() as hooks:
        for module in trunk.modules():
            if not isinstance(module, RotaryPositions):
                hooks.callback(module.register_forward_pre_hook(of_input).remove)
                hooks.callback(module.register_forward_hook(of_output).remove)
        yield


def _round(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).to(tensor.dtype)


def _parity_images(model: Servable, images: str | None) -> tuple[ImageBatch, str]:
    if images is None:
        from sklearn.datasets import load_sample_images

        pictures: Sequence[np.ndarray] = load_sample_images().images
        return np.stack(
            [model.preprocess.apply(Image.fromarray(picture)) for picture in pictures]
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
            f"no image of {images} can be decoded", remedy="give others with --images"
        )
    return np.stack(prepared[:_NUM_IMAGES]), images
