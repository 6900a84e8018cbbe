"""The graph of a model in eight-bit integers: NNCF's post-training quantization of that in fp32."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from importlib.util import find_spec
from logging import ERROR
from pathlib import Path
from typing import Final

import openvino as ov

from mlcd.encoders.openvino import INT8_GRAPH
from mlcd.errors import ConfigInvalid
from mlcd.extras import install_command
from mlcd.types import ImageBatch

_ATTENTION: Final = frozenset({"Softmax", "ScaledDotProductAttention"})
# where the last layer that is worth eight bits ends: all behind it makes rows of unit length
_LAYERS: Final = frozenset({"Constant", "Convolution", "MatMul", "Parameter", "ReduceMean"})


def require_nncf() -> None:
    """Raises ConfigInvalid where NNCF is not installed."""
    if find_spec("nncf") is None:
        raise ConfigInvalid(
            "graphs in int8 are made by the package nncf, which is not installed",
            remedy=install_command("quantize"),
        )


def quantize_graph(model: ov.Model, images: ImageBatch) -> ov.Model:
    """Returns a graph that computes in eight-bit integers as `model` does in fp32.

    images: prepared pixels [N, 3, S, S], on which the ranges of its values are measured. Weights
    and inputs of layers become integers; the normalization at the end stays in fp32.
    """
    import nncf

    nncf.set_log_level(ERROR)
    with _without_output():
        graph: ov.Model = nncf.quantize(
            model,
            nncf.Dataset([image[None] for image in images]),
            subset_size=len(images),
            preset=nncf.QuantizationPreset.MIXED,
            model_type=nncf.ModelType.TRANSFORMER if is_transformer(model) else None,
            ignored_scope=nncf.IgnoredScope(names=_tail(model), validate=False),
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                # It halves the range of weights for CPUs whose sums of two products overflow: those
                # without VNNI, which `check_precision` refuses. With it the starter's mean cosine
                # on photographs was 0.9897 in place of 0.9938.
                overflow_fix=nncf.OverflowFix.DISABLE
            ),
        )
    return graph


def is_transformer(model: ov.Model) -> bool:
    """Tells whether the graph computes attention, which NNCF quantizes by a scheme of its own."""
    return any(node.get_type_name() in _ATTENTION for node in model.get_ops())


def write_int8(model: ov.Model, folder: Path) -> None:
    """Writes the graph and its weights into `folder`."""
    ov.save_model(model, folder / INT8_GRAPH, compress_to_fp16=False)


def quantizer_versions() -> dict[str, str]:
    """Returns the versions of what makes the graph, for the manifest."""
    return {f"int8_{name}": version(name) for name in ("nncf", "openvino")}


def _tail(model: ov.Model) -> list[str]:
    """Returns the names of all nodes behind the last layer."""
    names: set[str] = set()
    waiting = [model.output(0).get_node()]
    while waiting:
        for value in waiting.pop().input_values():
            node = value.get_node()
            name = node.get_friendly_name()
            if node.get_type_name() not in _LAYERS and name not in names:
                names.add(name)
                waiting.append(node)
    return sorted(names)


@contextmanager
def _without_output() -> Iterator[None]:
    """Keeps NNCF's progress bars from the standard output, which is the command's."""
    with redirect_stdout(io.StringIO()):
        yield
