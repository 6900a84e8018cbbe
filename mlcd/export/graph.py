"""The ONNX graph of a model that is served, as torch's exporter writes it."""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import onnx
import torch
from torch import Tensor, nn

# beside the graph: the weights that a protobuf file cannot hold (2 GiB), those of the bigG towers
EXTERNAL: Final = "model.onnx.data"
_MAX_GRAPH_BYTES: Final = 1_900_000_000
_OPSET: Final = 18


def write_graph(
    model: nn.Module, example: Tensor, path: Path, *, input_name: str, dims: Mapping[int, Any]
) -> None:
    """Writes the graph of a model of one input, whose axes `dims` are free, and one output,
    `embedding`.
    """
    # Silences the exporter's remarks on its own internals and on packages that we do without.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
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
    _name_once(graph)
    if sum(tensor.nbytes for tensor in model.state_dict().values()) < _MAX_GRAPH_BYTES:
        onnx.save(graph, path)
    else:
        onnx.save(graph, path, save_as_external_data=True, location=EXTERNAL)


def _name_once(graph: onnx.ModelProto) -> None:
    """Renames values before the graph's output that have the same name.

    The exporter calls the rows of a look-up table `embedding`, whatever the outputs are called.
    ONNX Runtime refuses a name with two values.
    """
    last = {name: at for at, node in enumerate(graph.graph.node) for name in node.output}
    renamed: dict[str, str] = {}
    for number, node in enumerate(graph.graph.node):
        node.input[:] = [renamed.get(name, name) for name in node.input]
        for place, name in enumerate(node.output):
            renamed.pop(name, None)
            if name and last[name] != number:
                renamed[name] = node.output[place] = f"{name}.{number}"


def _strip_traces(graph: onnx.ModelProto) -> None:
    """Removes the source lines that the exporter records for every node: local paths, which differ
    by machine.
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
