"""Writes the ONNX graph of a model for serving, with torch's exporter."""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import onnx
import torch
from torch import Tensor, nn

ONNX: Final = "model.onnx"
# the weights of a graph that is too large for one protobuf file (2 GiB), as of the bigG towers
EXTERNAL: Final = "model.onnx.data"
_MAX_GRAPH_BYTES: Final = 1_900_000_000
_OPSET: Final = 18


def write_graph(
    model: nn.Module, example: Tensor, path: Path, *, input_name: str, dims: Mapping[int, Any]
) -> None:
    """Writes the graph of a model with one input, whose axes `dims` are dynamic, and the output
    `embedding`.
    """
    # Silences the exporter's remarks on its own internals and on optional packages.
    for name in ("torch.onnx", "onnxscript"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model.eval(),
            (example,),
            dynamo=True,
            verbose=False,
            opset_version=_OPSET,
            input_names=[input_name],
            output_names=["embedding"],
            dynamic_shapes=(dict(dims),),
        )
    assert program is not None
    graph = program.model_proto
    _strip_traces(graph)
    _make_names_unique(graph)
    if sum(tensor.nbytes for tensor in model.state_dict().values()) < _MAX_GRAPH_BYTES:
        onnx.save(graph, path)
    else:
        onnx.save(graph, path, save_as_external_data=True, location=EXTERNAL)


def write_image_graph(model: nn.Module, side: int, path: Path) -> None:
    """Writes a graph with input `image_u8`, uint8 [N, 3, side, side], and output `embedding`,
    float32 unit rows [N, D].
    """
    example = torch.zeros((2, 3, side, side), dtype=torch.uint8)
    dims = {0: torch.export.Dim("batch", min=1, max=65536)}
    write_graph(model, example, path, input_name="image_u8", dims=dims)


def _make_names_unique(graph: onnx.ModelProto) -> None:
    """Renames all but the last of the values with the same name.

    The exporter always calls the rows of a look-up table `embedding`, as the graph's output is
    called. ONNX Runtime refuses two values with one name.
    """
    last_nodes = {
        name: index for index, node in enumerate(graph.graph.node) for name in node.output
    }
    new_names: dict[str, str] = {}
    for index, node in enumerate(graph.graph.node):
        node.input[:] = [new_names.get(name, name) for name in node.input]
        for position, name in enumerate(node.output):
            new_names.pop(name, None)
            if name and last_nodes[name] != index:
                new_names[name] = node.output[position] = f"{name}.{index}"


def _strip_traces(graph: onnx.ModelProto) -> None:
    """Removes the source locations that the exporter records for every node, because local paths
    differ between machines.
    """
    del graph.metadata_props[:]
    for node in graph.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for value in (*graph.graph.input, *graph.graph.output, *graph.graph.value_info):
        del value.metadata_props[:]
    del graph.graph.metadata_props[:]
    for function in graph.functions:
        del function.metadata_props[:]
        for node in function.node:
            del node.metadata_props[:]
