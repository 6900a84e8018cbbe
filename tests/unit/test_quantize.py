"""The parts of `mlcd quantize`: which images calibrate and which judge, the graph, and the gate."""

import numpy as np
import openvino as ov
import pyarrow as pa
import pytest
from openvino import opset13

from mlcd.artifacts.centers import Centers
from mlcd.encoders.openvino import read_onnx
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.export.int8_agreement import Int8Agreement, compare_rows
from mlcd.export.int8_graph import _list_normalization, is_transformer, quantize_graph
from mlcd.images.entries import Entries
from mlcd.keys import mask_held_out, split_positions
from mlcd.pipelines.quantize import MIN_HELD_OUT, choose
from mlcd.types import unit_rows


def entries(num, num_classes):
    keys = [f"{number}.png" for number in range(num)]
    names = [str(number % num_classes) for number in range(num)] if num_classes else [None] * num
    columns = {"key": keys, "class_name": pa.array(names, pa.string()), "size_bytes": [1] * num}
    return Entries.of([pa.table(columns)])


@pytest.mark.parametrize("num_classes", [0, 10])
def test_the_images_that_judge_are_those_held_out_everywhere(num_classes):
    listed = entries(200, num_classes)
    calibration, judging = choose(listed, 1000)
    positions = split_positions(listed.keys(), listed.class_names())
    assert sorted(judging) == list(np.flatnonzero(mask_held_out(positions)))
    assert sorted([*calibration, *judging]) == list(range(200))


def test_a_smaller_number_takes_of_all_classes_and_the_same_images_each_time():
    listed = entries(1000, 5)
    calibration, judging = choose(listed, 20)
    for chosen in (calibration, judging):
        assert len(chosen) == 20
        assert np.bincount(chosen % 5).tolist() == [4] * 5
    assert not set(calibration) & set(judging)
    assert [*map(list, choose(listed, 20))] == [list(calibration), list(judging)]


def test_images_of_many_small_classes_are_held_out_nevertheless():
    calibration, judging = choose(entries(2 * MIN_HELD_OUT, 2 * MIN_HELD_OUT), 1000)
    assert len(calibration) == len(judging) == MIN_HELD_OUT
    with pytest.raises(InvalidInput, match=f"at least {2 * MIN_HELD_OUT} images"):
        choose(entries(2 * MIN_HELD_OUT - 1, 0), 1000)


def test_the_agreement_is_that_of_each_row_with_its_own():
    exact = unit_rows(np.array([[1.0, 0], [0, 1], [1, 1]]))
    found = unit_rows(np.array([[1.0, 0], [1, 1], [1, 1]]))
    centers = Centers(
        unit_rows(np.array([[1.0, 0.1], [0.1, 1.0]])), np.array([1, 1]), fingerprint="f" * 64
    )
    agreement = compare_rows(exact, found, centers)
    assert agreement.mean_cosine == pytest.approx((2 + 0.5**0.5) / 3)
    assert agreement.min_cosine == pytest.approx(0.5**0.5)
    assert agreement.label_kind == "the nearest of 2 centers"
    assert agreement.same_label == pytest.approx(2 / 3)  # [1, 1] is a tie, and the second was not
    assert agreement.num == 3


def test_labels_are_compared_in_the_space_of_the_centers():
    """With a mean, which is subtracted first."""
    rows = unit_rows(np.array([[1.0, 0.2], [1.0, -0.2]]))
    centers = Centers(
        unit_rows(np.array([[0.0, 1.0], [0.0, -1.0]])),
        np.array([1, 1]),
        fingerprint="f" * 64,
        mean=np.array([0.98, 0.0], np.float32),
    )
    assert compare_rows(rows, rows[::-1].copy(), centers).same_label == 0.0
    assert compare_rows(rows, rows, centers).same_label == 1.0


def test_without_centers_the_label_is_the_nearest_other_image():
    exact = unit_rows(np.array([[1.0, 0], [1, 0.1], [0, 1], [0.1, 1]]))
    found = exact.copy()
    found[1] = unit_rows(np.array([[0.3, 1.0]]))[0]
    agreement = compare_rows(exact, found, None)
    assert agreement.label_kind == "the nearest other image"
    # in fp32 the nearest of 0, 1, 2, 3 are 1, 0, 3, 2; in int8 1, 3, 3, 2
    assert agreement.same_label == 0.75


@pytest.mark.parametrize("mean", [0.98999, float("nan")])
def test_a_graph_below_the_bar_is_refused_with_its_figure(mean):
    below = Int8Agreement(mean, 0.9, 1.0, "x", 40)
    with pytest.raises(ConfigInvalid, match=rf"at least 0\.99, got {mean:.6f} on 40 held-out"):
        below.check("m")
    Int8Agreement(0.99, 0.5, 0.0, "x", 40).check("m")


def test_attention_tells_a_transformer(journey):
    assert is_transformer(read_onnx(journey / "model" / "model.onnx"))
    assert not is_transformer(convolutions())


def convolutions():
    """A small CNN: two convolutions, the mean over the picture, a shift, and unit rows."""
    generator = np.random.default_rng(0)
    pixels = opset13.parameter([-1, 3, 16, 16], np.uint8)
    values = opset13.divide(opset13.convert(pixels, "f32"), np.array(255, np.float32))
    for into, out in ((3, 16), (16, 32)):
        kernel = generator.standard_normal((out, into, 3, 3)).astype(np.float32)
        values = opset13.convolution(values, kernel, [2, 2], [1, 1], [1, 1], [1, 1])
        values = opset13.relu(values)
    rows = opset13.reduce_mean(values, np.array([2, 3]), keep_dims=False)
    rows = opset13.subtract(rows, np.full(32, 0.25, np.float32), name="shift")
    lengths = opset13.reduce_l2(rows, np.array([1]), keep_dims=True)
    return ov.Model([opset13.divide(rows, lengths, name="unit")], [pixels])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_layers_become_integers_and_what_makes_the_rows_does_not(quantizer, capfd):
    images = np.random.default_rng(1).integers(0, 256, (20, 3, 16, 16), dtype=np.uint8)
    graph = quantize_graph(convolutions(), images)
    nodes = {node.get_friendly_name(): node for node in graph.get_ops()}
    kinds = [node.get_type_name() for node in graph.get_ops()]
    assert kinds.count("FakeQuantize") >= 2  # the input of each convolution
    for name in ("shift", "unit"):
        given = {value.get_node().get_type_name() for value in nodes[name].input_values()}
        assert "FakeQuantize" not in given
    assert {"shift", "unit"} <= set(_list_normalization(convolutions()))
    assert capfd.readouterr() == ("", "")


def test_an_agreement_is_read_from_the_manifest_as_it_was_written():
    written = Int8Agreement(0.995, 0.9, 0.8, "x", 40)
    assert Int8Agreement.from_manifest(written.summary() | {"other": 1}) == written
