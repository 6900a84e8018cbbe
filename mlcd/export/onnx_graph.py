"""Builds ONNX graphs node by node, or from other graphs."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx
import onnx.inliner
from numpy.typing import NDArray
from onnx import helper, numpy_helper

OPSET: Final = 18
_IR_VERSION: Final = 8  # the oldest version with opset 18, for older engines


class GraphWriter:
    """Builds a graph; every node has one output, and methods that add a node return its name."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._constants: list[Any] = []

    def constant(self, value: NDArray[Any], name: str = "constant") -> str:
        unique = f"{name}.{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.ascontiguousarray(value), unique))
        return unique

    def number(self, value: float) -> str:
        return self.constant(np.array(value, np.float32))

    def integers(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Adds a node of ONNX's operator `kind`, and returns the name of its output."""
        output = f"{kind.lower()}.{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def rename(self, value: str, name: str) -> None:
        """Copies a value to a fixed name: an output, or an input of an included graph."""
        self._nodes.append(helper.make_node("Identity", [value], [name]))

    def include(self, model: Any, prefix: str, inputs: Mapping[str, str]) -> list[str]:
        """Adds all nodes of another graph, and returns the names of its outputs in this graph.

        inputs: name of a value of this graph for each input of the other.
        """
        flat = onnx.inliner.inline_local_functions(model) if model.functions else model
        inner = onnx.compose.add_prefix(flat, f"{prefix}.")
        for name, value in inputs.items():
            self.rename(value, f"{prefix}.{name}")
        self._nodes.extend(inner.graph.node)
        self._constants.extend(inner.graph.initializer)
        return [output.name for output in inner.graph.output]

    def unit_rows(self, rows: str) -> str:
        """Divides each row by its norm; a row of zeros stays zeros."""
        squares = self.add("ReduceSum", self.add("Mul", rows, rows), self.integers(-1), keepdims=1)
        length = self.add("Max", self.add("Sqrt", squares), self.number(1e-12))
        return self.add("Div", rows, length)

    def model(self, *, inputs: Sequence[Any], outputs: Sequence[Any], opset: int = OPSET) -> Any:
        """Returns the checked model.

        inputs, outputs: values of `onnx.helper.make_tensor_value_info`.
        """
        graph = helper.make_graph(
            self._nodes, "mlcd", list(inputs), list(outputs), initializer=self._constants
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=_IR_VERSION
        )
        onnx.checker.check_model(model, full_check=True)
        return model


def pixels_input(side: int) -> Any:
    """Returns the input of every image graph."""
    return helper.make_tensor_value_info(
        "image_u8", onnx.TensorProto.UINT8, ["batch", 3, side, side]
    )


def ids_input() -> Any:
    """Returns the input of every text graph."""
    return helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["batch", "length"])


def embedding_output(dimension: int) -> Any:
    return helper.make_tensor_value_info("embedding", onnx.TensorProto.FLOAT, ["batch", dimension])


def opset_of(model: Any) -> int:
    """Returns the version of ONNX's operators that a model uses."""
    return int(next(operators.version for operators in model.opset_import if not operators.domain))
