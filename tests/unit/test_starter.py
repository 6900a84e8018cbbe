"""The starter: its graphs against torch and transformers, its packages' hashes, and what it knows
of two photographs.
"""

import os
import pickle
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
import transformers
from click.testing import CliRunner
from PIL import Image
from torch.nn import functional

from mlcd.artifacts.manifest import open_artifact
from mlcd.cli import cli as command
from mlcd.demo import Demo, _print_search_by_words, _run
from mlcd.encoders import has_text, open_encoder, open_text_encoder
from mlcd.encoders.openvino import core
from mlcd.encoders.options import EncoderOptions
from mlcd.errors import ArtifactInvalid, ConfigInvalid
from mlcd.export.bridges import Linear, Mixture
from mlcd.export.model_artifact import export_model
from mlcd.export.onnx_graph import GraphWriter, embedding_output, ids_input
from mlcd.export.starter import artifact, packages
from mlcd.export.starter.classes import class_descriptions, class_sentences, imagenet_classes
from mlcd.export.starter.efficientnet_lite import PREPROCESS, feature_mean, write_tower
from mlcd.export.starter.packages import IMAGES, SENTENCES, WeightsFile
from mlcd.export.starter.sentences import (
    CONTEXT_LENGTH,
    add_sentence_encoder,
    read_sentence_encoder,
    sentence_tokenizer,
)
from mlcd.export.starter.text_graph import class_mixture
from mlcd.export.starter.torch_file import read_state
from mlcd.pipelines.resolve import resolve_model
from mlcd.pipelines.verify import verify
from mlcd.progress import Reporter
from tests.starter_sentences import embed_sentences

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
# (expands to, kernel, stride, channels) of each block, as the paper's table of B0 states them
BLOCKS = [
    (1, 3, 1, 16),
    *[(6, 3, 2, 24), (6, 3, 1, 24)],
    *[(6, 5, 2, 40), (6, 5, 1, 40)],
    *[(6, 3, 2, 80), (6, 3, 1, 80), (6, 3, 1, 80)],
    *[(6, 5, 1, 112)] * 3,
    *[(6, 5, 2, 192), (6, 5, 1, 192), (6, 5, 1, 192), (6, 5, 1, 192)],
    (6, 3, 1, 320),
]


def infer(model, *inputs):
    config = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = core().compile_model(core().read_model(model.SerializeToString()), "CPU", config)
    return compiled.create_infer_request().infer(list(inputs))[0]


def random_state():
    """Random weights of EfficientNet-Lite0, of a size that keeps activations between 0 and 6."""
    generator = torch.Generator().manual_seed(0)
    state = {}

    def convolution(name, norm, out, into, kernel):
        fan = into * kernel * kernel
        state[f"{name}.weight"] = torch.randn(out, into, kernel, kernel, generator=generator) * (
            2 / fan**0.5
        )
        for field, low, high in (("weight", 0.5, 1.5), ("bias", -0.5, 1), ("running_var", 0.5, 2)):
            state[f"{norm}.{field}"] = torch.rand(out, generator=generator) * (high - low) + low
        state[f"{norm}.running_mean"] = torch.randn(out, generator=generator) * 0.1

    convolution("_conv_stem", "_bn0", 32, 3, 3)
    into = 32
    for number, (factor, kernel, _, out) in enumerate(BLOCKS):
        prefix, wide = f"_blocks.{number}.", into * factor
        if factor > 1:
            convolution(f"{prefix}_expand_conv", f"{prefix}_bn0", wide, into, 1)
        convolution(f"{prefix}_depthwise_conv", f"{prefix}_bn1", wide, 1, kernel)
        convolution(f"{prefix}_project_conv", f"{prefix}_bn2", out, wide, 1)
        into = out
    convolution("_conv_head", "_bn1", 1280, into, 1)
    return state


def reference(state, images_u8):
    """EfficientNet-Lite0 in torch, in float64: convolution, normalization and ReLU6 one by one."""
    state = {name: tensor.double() for name, tensor in state.items()}

    def layer(x, name, norm, *, stride=1, groups=1, activate=True):
        kernel = state[f"{name}.weight"].shape[-1]
        # "same" of TensorFlow: what is missing, the larger half behind
        need = max((-(-x.shape[-1] // stride) - 1) * stride + kernel - x.shape[-1], 0)
        x = functional.pad(x, (need // 2, need - need // 2) * 2)
        x = functional.conv2d(x, state[f"{name}.weight"], stride=stride, groups=groups)
        fields = [state[f"{norm}.{each}"] for each in ("running_mean", "running_var")]
        scales = [state[f"{norm}.{each}"] for each in ("weight", "bias")]
        x = functional.batch_norm(x, *fields, *scales, eps=1e-3)
        return functional.relu6(x) if activate else x

    x = (torch.from_numpy(images_u8).double() - 127) / 128
    x = layer(x, "_conv_stem", "_bn0", stride=2)
    for number, (factor, _, stride, out) in enumerate(BLOCKS):
        prefix, before = f"_blocks.{number}.", x
        if factor > 1:
            x = layer(x, f"{prefix}_expand_conv", f"{prefix}_bn0")
        x = layer(x, f"{prefix}_depthwise_conv", f"{prefix}_bn1", stride=stride, groups=x.shape[1])
        x = layer(x, f"{prefix}_project_conv", f"{prefix}_bn2", activate=False)
        if stride == 1 and before.shape[1] == out:
            x = x + before
    return layer(x, "_conv_head", "_bn1").mean(dim=(2, 3)).numpy()


def test_the_image_graph_equals_the_architecture_in_torch():
    state = random_state()
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 224, 224), dtype=np.uint8)
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    expected = reference(state, images) - feature_mean(arrays)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert infer(write_tower(arrays), images) == pytest.approx(expected, abs=1e-4)


def test_the_mean_is_that_of_cut_normal_numbers():
    state = {"_bn1.bias": np.array([0.0, 1.0, -2.0, 7.0]), "_bn1.weight": np.array([1, -2, 1, 3.0])}
    drawn = np.random.default_rng(0).normal(size=(1_000_000, 4))
    expected = np.clip(state["_bn1.bias"] + state["_bn1.weight"] * drawn, 0, 6).mean(axis=0)
    assert feature_mean(state) == pytest.approx(expected, abs=5e-3)


def save(path, state):
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path


def test_a_state_dict_reads_as_torch_reads_it(tmp_path):
    state = random_state() | {
        "turned": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        "part": torch.arange(10.0)[3:7],
        "count": torch.tensor(5),
        "counts": torch.arange(3),
    }
    found = read_state(save(tmp_path / "weights.pth", state))
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.numpy().dtype
        assert np.array_equal(found[name], tensor.numpy())


class Hostile:
    def __reduce__(self):
        return os.system, ("touch hacked",)


@pytest.mark.parametrize("damage", ["a program", "cut short", "a zip", "text", "another storage"])
def test_a_file_of_anything_else_is_refused(tmp_path, damage, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "weights.pth"
    if damage == "a program":
        save(path, {"weight": torch.ones(3)})
        head = path.read_bytes().split(b"ccollections")[0]
        path.write_bytes(head + pickle.dumps(Hostile(), protocol=2)[2:])
    elif damage == "a zip":
        torch.save({"weight": torch.ones(3)}, path)
    elif damage == "text":
        path.write_text("weights")
    elif damage == "another storage":
        save(path, {"weight": torch.ones(3, dtype=torch.complex64)})
    else:
        save(path, {"weight": torch.ones(3)})
        path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(ArtifactInvalid, match=r"weights\.pth"):
        read_state(path)
    assert not (tmp_path / "hacked").exists()


def test_the_tokenizer_is_berts(tmp_path):
    vocabulary = Path(artifact.__file__).with_name("bert_uncased_vocab.txt")
    theirs = transformers.BertTokenizer(vocab=str(vocabulary))
    texts = [
        "",
        "a photo of a dog",
        "Ünïcode naïve",
        "漢字 and \u202eabc\x00",
        "x" * 300,
        "dog " * 400,
    ]
    ours = sentence_tokenizer().encode_batch(texts)
    expected = theirs(texts, padding="max_length", truncation=True, max_length=CONTEXT_LENGTH)
    assert [each.ids for each in ours] == expected["input_ids"]


@pytest.mark.parametrize("bridge", ["mixture", "linear"])
def test_a_bridge_in_a_graph_is_the_bridge_in_numpy(bridge):
    random = np.random.default_rng(0)

    def rows(*shape):
        drawn = random.normal(size=shape)
        return drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)

    mean = rows(8) * 0.3
    if bridge == "mixture":
        made = Mixture(rows(20, 8), rows(20, 5), 0.1, random.random(20) + 0.1, mean)
    else:
        made = Linear(random.normal(size=(8, 5)), mean)
    texts = rows(7, 8).astype(np.float32)
    graph = GraphWriter()
    graph.rename(made.add(graph, "rows"), "embedding")
    given = onnx.helper.make_tensor_value_info("rows", onnx.TensorProto.FLOAT, ["batch", 8])
    model = graph.model(inputs=[given], outputs=[embedding_output(5)])
    assert infer(model, texts) == pytest.approx(made.apply(texts), abs=1e-5)
    assert np.linalg.norm(made.apply(texts), axis=1) == pytest.approx(np.ones(7), abs=1e-5)


def test_every_class_has_the_same_share():
    classes = imagenet_classes()
    assert len(classes) == 1000
    assert len({each.name for each in classes}) > 990
    counts = [len(set(each.descriptions())) for each in classes]
    texts = np.random.default_rng(0).normal(size=(sum(counts), 384)).astype(np.float32)
    classifier = np.random.default_rng(1).normal(size=(1000, 16)).astype(np.float32)
    mixture = class_mixture(texts, classes, classifier)
    assert mixture.shares.sum() == pytest.approx(1000)
    assert len(mixture.values) == sum(counts)


def test_the_shipped_rows_are_those_of_the_sentence_encoder(starter):
    """`python -m tests.starter_sentences` makes them."""
    texts = class_descriptions()
    shipped = class_sentences()
    assert shipped.shape == (len(texts), 384)
    some = range(0, len(texts), 25)
    rows = embed_sentences([texts[at] for at in some])
    assert (rows * shipped[some]).sum(axis=1) == pytest.approx(np.ones(len(some)), abs=1e-5)


def package(folder, content=b"weights", sha256="0" * 64):
    (folder / "weights_of_a_test").mkdir(parents=True)
    (folder / "weights_of_a_test" / "__init__.py").write_text("raise SystemExit('run')")
    if content is not None:
        (folder / "weights_of_a_test" / "model.bin").write_bytes(content)
    return WeightsFile("weights-of-a-test", "1.2", "weights_of_a_test", "model.bin", sha256)


@pytest.mark.parametrize("content", [b"weights", None])
def test_other_weights_are_refused_by_name(tmp_path, monkeypatch, content):
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ArtifactInvalid, match=r"model\.bin.*weights-of-a-test==1\.2"):
        package(tmp_path, content).locate()


def test_a_missing_package_is_named_with_the_extra(tmp_path, monkeypatch):
    missing = WeightsFile("weights-of-a-test", "1.2", "weights_of_a_test", "model.bin", "0" * 64)
    with pytest.raises(ConfigInvalid, match=r"weights-of-a-test.*\[starter\]"):
        missing.locate()
    monkeypatch.setattr(artifact, "IMAGES", missing)
    with pytest.raises(ConfigInvalid, match="weights-of-a-test"):
        artifact.export_starter(tmp_path / "out", reporter=Reporter("silent"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--format", "triton"],
        ["--format", "hf"],
        ["--no-text"],
        ["--images", "x"],
        ["--text", "starter"],
        ["--precision", "fp16"],
    ],
)
def test_options_that_it_cannot_follow_are_refused(tmp_path, options):
    done = CliRunner().invoke(command, ["export", "starter", str(tmp_path / "out"), *options])
    assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert f"{options[0]} cannot be combined" in done.output


def test_it_is_not_exported_again(starter, tmp_path):
    with pytest.raises(ConfigInvalid, match="graphs without weights"):
        export_model(str(starter), tmp_path / "out", name="m", reporter=Reporter("silent"))


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == "onnx" else object())
    with pytest.raises(ConfigInvalid, match=r"onnx.*\[starter\]"):
        packages.require_libraries()


def test_sentences_are_those_of_bert_with_the_same_weights(starter):
    """transformers' BertModel with the weights of the package multiplied out, mean over the mask."""
    graph = onnx.load(SENTENCES.locate())
    arrays = {
        each.name: onnx.numpy_helper.to_array(each).astype(np.float64)
        for each in graph.graph.initializer
    }
    scaled = [name.removesuffix("_q") for name in arrays if name.endswith("_q")]
    weights = {name: arrays[f"{name}_q"] * arrays[f"{name}_scale"] for name in scaled}
    parts = ["attention.self.query", "attention.self.key", "attention.self.value"]
    parts += ["attention.output.dense", "intermediate.dense", "output.dense"]
    names = [f"encoder.layer.{layer}.{part}.weight" for layer in range(6) for part in parts]
    products = sorted((n for n in weights if n.startswith("val_")), key=lambda n: int(n[4:]))
    state = {name: weights[each].T for name, each in zip(names, products, strict=True)}
    own = {name: array for name, array in (arrays | weights).items() if name.startswith("inner.")}
    state |= {name.removeprefix("inner."): array for name, array in own.items()}
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    bert = transformers.BertModel(config, add_pooling_layer=False).eval()
    known = bert.state_dict()
    bert.load_state_dict({name: torch.from_numpy(state[name]).float() for name in known})
    texts = ["a photo of a dog", "", "Two men ride an elephant through the rain.", "naïve 漢字"]
    ids = np.array([each.ids for each in sentence_tokenizer().encode_batch(texts)], np.int64)
    mask = torch.from_numpy(ids != 0)
    with torch.inference_mode():
        hidden = bert(torch.from_numpy(ids), attention_mask=mask.long()).last_hidden_state
    expected = functional.normalize((hidden * mask[:, :, None]).sum(dim=1), dim=1).numpy()
    writer = GraphWriter()
    encoder = read_sentence_encoder(SENTENCES.locate())
    writer.rename(add_sentence_encoder(writer, encoder, "ids"), "embedding")
    model = writer.model(inputs=[ids_input()], outputs=[embedding_output(384)], opset=17)
    assert infer(model, ids) == pytest.approx(expected, abs=1e-5)
    assert infer(model, ids[:1, :8]) == pytest.approx(expected[:1], abs=1e-5)


def test_the_packages_weights_read_as_torch_reads_them(starter):
    theirs = torch.load(IMAGES.locate(), weights_only=True)
    ours = read_state(IMAGES.locate())
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name].numpy()) for name in ours)


def test_the_starter_is_a_model_of_images_and_texts(starter):
    model = open_artifact(starter, "model")
    assert model.config["name"] == "starter"
    assert has_text(str(starter))
    assert {parent.path.split("/")[-1] for parent in model.parents} == {
        "efficientnet-lite0-57934424.pth",
        "model.onnx",
    }
    assert all(finding.checked for finding in verify(starter))
    with (
        closing(open_encoder(str(starter))) as images,
        closing(open_text_encoder(str(starter))) as texts,
    ):
        assert images.fingerprint == texts.fingerprint == model.fingerprint
        assert images.dimension == texts.dimension == 1280
        assert images.engine == texts.engine == "openvino"
    with pytest.raises(ConfigInvalid, match="torch"):
        open_encoder(str(starter), EncoderOptions(engine="torch"))


def test_its_identity_does_not_depend_on_the_machine(starter):
    """Rows of the classes differ in their last bits between CPUs; the fingerprint is of the
    weights.
    """
    model = open_artifact(starter)
    assert model.config["starter"] == model.summary["weights_digest"] == artifact.starter_digest()
    assert model.fingerprint == PREPROCESS.fingerprint(artifact.starter_digest())


def test_photographs_are_found_by_words(starter):
    from sklearn.datasets import load_sample_images

    texts = ["a photo of a flower", "a photo of a Chinese temple", "a photo of a dog"]
    with (
        closing(open_encoder(str(starter))) as images,
        closing(open_text_encoder(str(starter))) as words,
    ):
        pictures = [Image.fromarray(each) for each in load_sample_images().images]
        rows = images.encode(np.stack([images.preprocess.apply(each) for each in pictures]))
        scores = rows @ words.encode(words.tokenizer(texts)).T
        scaled = np.exp(words.calibration.scale * scores)
    assert words.calibration.bias is None
    temple, flower = scaled / scaled.sum(axis=1, keepdims=True)
    assert flower[0] > 0.8
    assert temple[1] > 0.8


def test_starter_is_a_name_wherever_models_are_named(starter, tmp_path, monkeypatch):
    """The cache is asked first: with the artifact in it nothing is exported."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def put(spec, out, name, announce):
        made.append((spec, name))
        out.symlink_to(starter)

    monkeypatch.setattr("mlcd.pipelines.resolve._export", put)
    found = [resolve_model("starter"), resolve_model("starter")]
    assert found[0] == found[1]
    assert Path(found[0]).name.startswith("starter-")
    assert made == [("starter", "starter")]


@pytest.mark.parametrize(
    ("images", "features", "there", "chosen"),
    [
        (None, None, True, "hog"),
        ("photos", None, True, "starter"),
        ("photos", None, False, "hog"),
        ("photos", "mine.onnx", True, "mine.onnx"),
    ],
)
def test_the_demo_takes_the_starter_for_photographs(monkeypatch, images, features, there, chosen):
    monkeypatch.setattr("mlcd.demo.starter_installed", lambda: there)
    assert Demo(Path("out"), images, features)._features == chosen


@pytest.mark.parametrize("classes", [["flower", "chinese_temple"], [None, None]])
def test_the_demo_finds_photographs_by_words(starter, monkeypatch, capfd, classes):
    from sklearn.datasets import load_sample_images

    with closing(open_encoder(str(starter))) as encoder:
        pictures = [Image.fromarray(each) for each in load_sample_images().images]
        rows = encoder.encode(np.stack([encoder.preprocess.apply(each) for each in pictures]))
    features = SimpleNamespace(
        class_names=classes, keys=["temple.jpg", "flower.jpg"], load=lambda: rows
    )
    monkeypatch.setattr("mlcd.demo.resolve_model", lambda _: str(starter))
    _print_search_by_words(features)
    shown = capfd.readouterr().out
    if classes[0] is None:
        assert "a photo of a building: temple.jpg, flower.jpg" in shown
    else:
        assert "a photo of chinese temple: temple.jpg, flower.jpg" in shown
        assert "a photo of flower: flower.jpg, temple.jpg" in shown


@pytest.mark.parametrize("end", ["trap '' INT; kill -INT $PPID; exit 0", "exit 130"])
def test_an_interrupt_while_a_step_ends_ends_the_demo(end, tmp_path, monkeypatch):
    step = tmp_path / "step"
    step.write_text(f"#!/bin/sh\n{end}\n")
    step.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(step))
    with pytest.raises(KeyboardInterrupt):
        _run([])
