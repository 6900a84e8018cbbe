"""EfficientNet-Lite0 (Tan and Le, 2019; the variant of TensorFlow for mobile devices) as an
ONNX graph.

Its blocks omit squeeze-and-excitation and use ReLU6 instead of swish. Batch normalization is folded
into the convolutions. Padding is TensorFlow's "same": an odd pixel goes to the right and below.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.export.onnx_graph import GraphWriter, embedding_output, pixels_input
from mlcd.images.transform import PreprocessSpec

Arrays = Mapping[str, NDArray[Any]]

PREPROCESS: Final = PreprocessSpec(
    resize_shortest=256,
    crop=224,
    mean=(127 / 255, 127 / 255, 127 / 255),
    std=(128 / 255, 128 / 255, 128 / 255),
)
DIMENSION: Final = 1280
_EPS: Final = 1e-3
_STANDARD: Final = NormalDist()


@dataclass(frozen=True)
class _Stage:
    """A sequence of blocks of one width; only the first block has the stride."""

    num_blocks: int
    stride: int
    num_channels: int


_STAGES: Final = (
    _Stage(1, 1, 16),
    _Stage(2, 2, 24),
    _Stage(2, 2, 40),
    _Stage(3, 2, 80),
    _Stage(3, 1, 112),
    _Stage(4, 2, 192),
    _Stage(1, 1, 320),
)


def write_tower(state: Arrays) -> Any:
    """Returns the graph from uint8 pixels to unit rows of the pooled features minus their mean."""
    tower = _Tower(state)
    pixels = tower.graph.add("Cast", "image_u8", to=1)
    value = tower.convolution(_scale(tower.graph, pixels), "_conv_stem", "_bn0", stride=2)
    value = tower.relu6(value)
    num_channels, block_index = 32, 0
    for stage in _STAGES:
        for index in range(stage.num_blocks):
            stride = stage.stride if index == 0 else 1
            skip = stride == 1 and num_channels == stage.num_channels
            value = tower.block(value, block_index, stride, skip=skip)
            num_channels, block_index = stage.num_channels, block_index + 1
    value = tower.relu6(tower.convolution(value, "_conv_head", "_bn1"))
    graph = tower.graph
    pooled = graph.add("Flatten", graph.add("GlobalAveragePool", value))
    centered = graph.add("Sub", pooled, graph.constant(feature_mean(state), "mean"))
    graph.rename(graph.unit_rows(centered), "embedding")
    return graph.model(
        inputs=[pixels_input(PREPROCESS.crop)], outputs=[embedding_output(DIMENSION)]
    )


def feature_mean(state: Arrays) -> NDArray[np.float32]:
    """Estimates the mean of the pooled features over the training images, without any image.

    The last batch normalization has the mean and deviation of each feature before ReLU6; the mean
    after ReLU6 is that of a normal distribution clipped to 0 and 6.
    """
    mean = state["_bn1.bias"].astype(np.float64)
    deviation = np.abs(state["_bn1.weight"].astype(np.float64)) + 1e-12
    # a sum over 2,000 quantiles replaces the integral
    probabilities = (np.arange(2000) + 0.5) / 2000
    normal = np.array([_STANDARD.inv_cdf(probability) for probability in probabilities])
    values = np.clip(mean[:, None] + deviation[:, None] * normal, 0, 6)
    means: NDArray[np.float64] = values.mean(axis=1)
    return means.astype(np.float32)


class _Tower:
    def __init__(self, state: Arrays) -> None:
        self.graph = GraphWriter()
        self._state = state

    def block(self, value: str, index: int, stride: int, *, skip: bool) -> str:
        """Adds an expansion (except in the first block), a depthwise convolution, a projection."""
        prefix = f"_blocks.{index}."
        inner = value
        if index > 0:
            inner = self.relu6(self.convolution(inner, f"{prefix}_expand_conv", f"{prefix}_bn0"))
        inner = self.convolution(
            inner, f"{prefix}_depthwise_conv", f"{prefix}_bn1", stride=stride, separate=True
        )
        inner = self.convolution(self.relu6(inner), f"{prefix}_project_conv", f"{prefix}_bn2")
        return self.graph.add("Add", inner, value) if skip else inner

    def convolution(
        self, value: str, name: str, norm: str, *, stride: int = 1, separate: bool = False
    ) -> str:
        """Adds a convolution and the batch normalization after it."""
        weight, bias = self._fold(name, norm)
        kernel = weight.shape[2]
        # valid because the input of every convolution with stride 2 has an even side
        before, after = (kernel - stride) // 2, (kernel - stride + 1) // 2
        return self.graph.add(
            "Conv",
            value,
            self.graph.constant(weight, f"{name}.weight"),
            self.graph.constant(bias, f"{name}.bias"),
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[before, before, after, after],
            group=len(weight) if separate else 1,
        )

    def relu6(self, value: str) -> str:
        return self.graph.add("Clip", value, self.graph.number(0), self.graph.number(6))

    def _fold(self, name: str, norm: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        def read(field: str) -> NDArray[np.float64]:
            return self._state[f"{norm}.{field}"].astype(np.float64)

        scale = read("weight") / np.sqrt(read("running_var") + _EPS)
        weight = self._state[f"{name}.weight"].astype(np.float64) * scale[:, None, None, None]
        bias = read("bias") - read("running_mean") * scale
        return weight.astype(np.float32), bias.astype(np.float32)


def _scale(graph: GraphWriter, pixels: str) -> str:
    """Applies (x - 127) / 128."""
    shifted = graph.add("Sub", pixels, graph.number(127))
    return graph.add("Mul", shifted, graph.number(1 / 128))
