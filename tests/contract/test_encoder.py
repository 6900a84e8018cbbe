"""One suite for the `Encoder` protocol, run on every adapter."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image

from mlcd.encoders import open_encoder
from mlcd.encoders.options import EncoderOptions
from mlcd.encoders.unit_rows import MAX_BATCH
from mlcd.errors import ArtifactInvalid, ConfigInvalid, InvalidInput, NotFound, Unavailable
from mlcd.images.decode import decode
from tests.endpoint_stub import Stub


def external_onnx(folder, **changes):
    """A tiny foreign encoder: 4x4 average pooling of normalized pixels, flattened."""
    nodes = [
        helper.make_node(
            "AveragePool", ["pixels"], ["pooled"], kernel_shape=[4, 4], strides=[4, 4]
        ),
        helper.make_node("Flatten", ["pooled"], ["features"]),
        helper.make_node("Neg", ["features"], ["other"]),
    ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["N", 3, 8, 8])],
        [
            helper.make_tensor_value_info("other", TensorProto.FLOAT, ["N", 12]),
            helper.make_tensor_value_info("features", TensorProto.FLOAT, ["N", 12]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, folder / "tiny.onnx")
    card = {"input": "pixels", "output": "features", "resize_shortest": 8, "crop": 8}
    card |= {"dimension": 12}
    card |= {"mean": [0.5, 0.4, 0.3], "std": [0.5, 0.25, 0.2], "layout": "NCHW", **changes}
    (folder / "tiny.json").write_text(
        json.dumps({name: value for name, value in card.items() if value is not None})
    )
    return folder / "tiny.onnx"


@pytest.fixture(
    params=["hog", "pixels", "external", "endpoint", "openvino", "openvino int8", "torch"]
)
def encoder(request, tmp_path, monkeypatch):
    stub = None
    if request.param == "endpoint":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        opened = open_encoder((stub := Stub()).url())
    elif request.param == "external":
        opened = open_encoder(str(external_onnx(tmp_path)))
    elif request.param == "openvino int8":
        model = request.getfixturevalue("int8_model")
        opened = open_encoder(str(model), EncoderOptions(precision="int8"))
    elif request.param in ("openvino", "torch"):
        opened = open_encoder(
            str(request.getfixturevalue("journey") / "model"), EncoderOptions(engine=request.param)
        )
        assert opened.engine == request.param
    else:
        opened = open_encoder(request.param)
    yield opened
    opened.close()
    if stub is not None:
        stub.down()


def images(encoder, num):
    side = encoder.preprocess.crop
    return np.random.default_rng(0).integers(0, 256, (num, 3, side, side), dtype=np.uint8)


def test_rows_are_float32_unit_and_of_the_stated_dimension(encoder):
    rows = encoder.encode(images(encoder, 5))
    assert rows.shape == (5, encoder.dimension)
    assert rows.dtype == np.float32
    assert np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(5), abs=1e-6)


def test_any_batch_size_gives_the_same_rows(encoder):
    """Within 1e-5: engines choose their kernels by batch size. Batches over the bound are split."""
    batch = images(encoder, 2 * MAX_BATCH + 5)
    rows = encoder.encode(batch)
    for num in (1, 2, 7, MAX_BATCH, MAX_BATCH + 1):
        assert encoder.encode(batch[:num]) == pytest.approx(rows[:num], abs=1e-5), num


def test_neighbors_of_any_kind_change_nothing(encoder):
    batch = images(encoder, 8)
    expected = encoder.encode(batch)[3]
    for neighbor in (0, 255):
        changed = np.full_like(batch, neighbor)
        changed[3] = batch[3]
        assert encoder.encode(changed)[3] == pytest.approx(expected, abs=1e-6)


def test_the_same_call_gives_the_same_bits(encoder):
    batch = images(encoder, 11)
    assert (encoder.encode(batch) == encoder.encode(batch)).all()


def test_earlier_rows_stay_as_they_were(encoder):
    """No engine hands out memory that its next inference overwrites."""
    batch = images(encoder, 4)
    rows = encoder.encode(batch[:2])
    kept = rows.copy()
    encoder.encode(batch[2:])
    assert (rows == kept).all()


def test_arrays_of_any_layout_are_taken(encoder):
    batch = images(encoder, 6)
    expected = encoder.encode(batch[::2].copy())
    batch.flags.writeable = False
    assert encoder.encode(batch[::2]) == pytest.approx(expected, abs=1e-6)
    assert encoder.encode(batch)[::2] == pytest.approx(expected, abs=1e-5)


def test_close_may_be_called_twice(encoder):
    encoder.close()
    encoder.close()


@pytest.mark.parametrize("engine", ["openvino", "torch"])
def test_a_closed_engine_says_so(journey, engine):
    encoder = open_encoder(str(journey / "model"), EncoderOptions(engine=engine))
    batch = images(encoder, 1)
    encoder.close()
    with pytest.raises(Unavailable, match="closed"):
        encoder.encode(batch)


def test_both_engines_give_the_same_rows(journey):
    openvino, torch = (
        open_encoder(str(journey / "model"), EncoderOptions(engine=engine))
        for engine in ("openvino", "torch")
    )
    assert openvino.fingerprint == torch.fingerprint
    batch = images(torch, 40)
    assert openvino.encode(batch) == pytest.approx(torch.encode(batch), abs=1e-4)


def test_an_empty_batch_gives_no_rows(encoder):
    assert encoder.encode(images(encoder, 0)).shape == (0, encoder.dimension)


@pytest.mark.parametrize("change", ["dtype", "size", "channels"])
def test_another_shape_or_type_is_refused(encoder, change):
    batch = images(encoder, 1)
    wrong = {"dtype": batch.astype(np.float32), "size": batch[..., :-1], "channels": batch[:, :1]}[
        change
    ]
    with pytest.raises(InvalidInput, match="expected uint8 images"):
        encoder.encode(wrong)


def test_threads_may_share_it(encoder):
    batch = images(encoder, 16)
    expected = encoder.encode(batch)
    with ThreadPoolExecutor(4) as pool:
        for rows in pool.map(encoder.encode, [batch] * 16):
            assert (rows == expected).all()


def test_the_fingerprint_names_the_model(encoder):
    assert len(encoder.fingerprint) == 64
    int(encoder.fingerprint, 16)


def test_the_external_graph_normalizes_inside(tmp_path):
    encoder = open_encoder(str(external_onnx(tmp_path)))
    batch = images(encoder, 3)
    pixels = (batch / 255.0 - np.array([0.5, 0.4, 0.3])[:, None, None]) / np.array(
        [0.5, 0.25, 0.2]
    )[:, None, None]
    expected = pixels.reshape(3, 3, 2, 4, 2, 4).mean(axis=(3, 5)).reshape(3, -1)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert encoder.encode(batch) == pytest.approx(expected, abs=1e-5)
    encoder.close()


def test_another_card_is_another_model(tmp_path):
    first = open_encoder(str(external_onnx(tmp_path))).fingerprint
    assert open_encoder(str(external_onnx(tmp_path, mean=[0.5, 0.5, 0.5]))).fingerprint != first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": None}, "mean field required"),
        ({"dimension": 13}, "must have the shape"),
        ({"output": "logits"}, "outputs"),
        ({"colour": "RGB"}, "colour extra inputs"),
        ({"crop": 9}, "crop"),
        ({"crop": "big"}, "crop"),
        ({"mean": [0.5]}, "mean"),
        ({"layout": "banana"}, "layout"),
        ({"name": "../up"}, "cannot name a model"),
    ],
)
def test_a_card_that_does_not_fit_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigInvalid, match=message):
        open_encoder(str(external_onnx(tmp_path, **changes)))


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(NotFound, match="mlcd export"):
        open_encoder(str(tmp_path))
    path = external_onnx(tmp_path)
    path.write_bytes(b"not onnx")
    with pytest.raises(ArtifactInvalid, match="ONNX"):
        open_encoder(str(path))
    path.with_suffix(".json").unlink()
    with pytest.raises(ConfigInvalid, match=r"tiny\.json is missing"):
        open_encoder(str(path))


def test_mobilenet_gives_its_reference_features(shared_data):
    folder = shared_data / "encoders" / "mobilenet_v2_imagenet"
    encoder = open_encoder(str(folder / "mobilenet_v2_1.0_224.onnx"))
    reference = np.load(folder / "reference_features.npz")
    wanted = reference["features"] / np.linalg.norm(reference["features"], axis=1, keepdims=True)
    pixels, ours = [], []
    for path in reference["paths"]:
        data = (shared_data / "caltech101_20" / str(path)).read_bytes()
        image = decode(data)
        # The reference rounds the longer side; CLIP's processor, which we follow, truncates it.
        size = [round(256 * side / min(image.size)) for side in image.size]
        left, top = (size[0] - 224) // 2, (size[1] - 224) // 2
        resized = image.resize(size, Image.Resampling.BICUBIC).crop(
            (left, top, left + 224, top + 224)
        )
        pixels.append(np.asarray(resized).transpose(2, 0, 1))
        ours.append(encoder.preprocess.prepare(data))
    assert (encoder.encode(np.stack(pixels)) * wanted).sum(axis=1).min() > 0.99999
    assert (encoder.encode(np.stack(ours)) * wanted).sum(axis=1).min() > 0.98
    encoder.close()
