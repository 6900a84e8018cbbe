"""Quantizes the fp32 graph of a model to eight-bit integers, by NNCF after training."""

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
# Types of nodes that are worth eight bits. The nodes after the last of them normalize the rows.
_LAYERS: Final = frozenset({"Constant", "Convolution", "MatMul", "Parameter", "ReduceMean"})


def require_nncf() -> None:
    """Raises ConfigInvalid if NNCF is not installed."""
    if find_spec("nncf") is None:
        raise ConfigInvalid(
            "int8 graphs need the package nncf, which is not installed",
            remedy=install_command("quantize"),
        )


def quantize_graph(model: ov.Model, images: ImageBatch) -> ov.Model:
    """Returns `model`, an fp32 graph, quantized to eight-bit integers.

    images: prepared pixels [N, 3, S, S] that calibrate the ranges of values. Weights and inputs of
    layers become integers; the normalization at the end stays in fp32.
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
            ignored_scope=nncf.IgnoredScope(names=_list_normalization(model), validate=False),
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                # The fix halves the range of weights for CPUs without VNNI, whose sums of two
                # products overflow; `check_precision` refuses these CPUs. With the fix, the
                # starter's mean cosine on photographs was 0.9897 instead of 0.9938.
                overflow_fix=nncf.OverflowFix.DISABLE
            ),
        )
    return graph


def is_transformer(model: ov.Model) -> bool:
    """Tells whether the graph computes attention, for which NNCF has a separate scheme."""
    return any(node.get_type_name() in _ATTENTION for node in model.get_ops())


def write_int8(model: ov.Model, folder: Path) -> None:
    """Writes the graph and its weights into `folder`."""
    ov.save_model(model, folder / INT8_GRAPH, compress_to_fp16=False)


def quantizer_versions() -> dict[str, str]:
    """Returns the versions of the quantizing packages, for the manifest."""
    return {f"int8_{name}": version(name) for name in ("nncf", "openvino")}


def _list_normalization(model: ov.Model) -> list[str]:
    """Returns the names of all nodes after the last layer."""
    names: set[str] = set()
    pending = [model.output(0).get_node()]
    while pending:
        for value in pending.pop().input_values():
            node = value.get_node()
            name = node.get_friendly_name()
            if node.get_type_name() not in _LAYERS and name not in names:
                names.add(name)
                pending.append(node)
    return sorted(names)


@contextmanager
def _without_output() -> Iterator[None]:
    """Keeps NNCF's progress bars out of the standard output, where the command prints results."""
    with redirect_stdout(io.StringIO()):
        yield
