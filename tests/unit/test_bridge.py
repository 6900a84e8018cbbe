"""Texts for a model that has none: the fit against an oracle, and whole artifacts with random
towers.
"""

import hashlib
import json
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Request, open_artifact
from mlcd.commands.export_model import export
from mlcd.encoders import has_text, open_encoder, open_text_encoder
from mlcd.encoders.options import EncoderOptions
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.export.bridge_fit import Pivots, fit_bridge, ridge
from mlcd.export.model_artifact import export_model
from mlcd.export.onnx_graph import GraphWriter, embedding_output, opset_of, pixels_input
from mlcd.images.transform import PreprocessSpec
from mlcd.models.text_part import digest_of_both, text_digest
from mlcd.pipelines.bridge import bridge_model
from mlcd.pipelines.verify import verify
from mlcd.progress import Reporter
from tests.two_tower_models import write_two_tower_checkpoint
from tests.unit.models.test_checkpoints import SIZES, tower, write_hf

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SILENT = Reporter("silent")


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_ridge_is_least_squares_with_a_penalty():
    random = np.random.default_rng(0)
    inputs, outputs = random.normal(size=(60, 8)), random.normal(size=(60, 5))
    penalty = 0.3 * np.trace(inputs.T @ inputs) / 8
    longer = np.concatenate([inputs, np.sqrt(penalty) * np.eye(8)])
    expected, *_ = np.linalg.lstsq(longer, np.concatenate([outputs, np.zeros((8, 5))]))
    assert ridge(inputs, outputs, 0.3) == pytest.approx(expected, abs=1e-12)
    true = random.normal(size=(8, 5))
    assert ridge(inputs, inputs @ true, 0) == pytest.approx(true, abs=1e-12)


def linear_pivots(num=400, classes=8):
    """Images of some classes in a space, the same through a random linear map, and texts that lie
    near their classes' images but all to one side.
    """
    random = np.random.default_rng(0)
    class_of = np.arange(num) % classes
    middles = random.normal(size=(classes, 24))
    images = unit(middles[class_of] + 0.5 * random.normal(size=(num, 24)))
    other = images @ random.normal(size=(24, 32)) + 3 * random.normal(size=32)
    gap = 3 * unit(random.normal(size=(1, 24)))
    names = unit(unit(middles) + gap)
    general = unit(unit(random.normal(size=(500, 24))) + gap).mean(axis=0)
    return Pivots(images, unit(other), random.random(num), class_of, names, general)


@pytest.mark.parametrize("kind", ["mixture", "ridge"])
def test_names_find_their_images_in_the_other_space(kind):
    pivots = linear_pivots()
    fitted = fit_bridge(kind, pivots)
    assert fitted.facts["bridge_zero_shot"] > 0.95
    assert fitted.facts["bridge_chosen_by"] == "names"
    assert fitted.facts["bridge_held_out"] + fitted.facts["bridge_pivots"] == len(pivots)
    scores = fitted.scale * pivots.target @ fitted.bridge.apply(pivots.names).T
    shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    right = shares[np.arange(len(pivots)), pivots.class_of]
    assert right.mean() == pytest.approx((shares.argmax(axis=1) == pivots.class_of).mean(), abs=0.1)


def test_a_linear_relation_is_recovered_from_images_alone():
    pivots = linear_pivots()
    unnamed = Pivots(
        pivots.source,
        pivots.target,
        pivots.positions,
        np.full(len(pivots), -1),
        pivots.names[:0],
        pivots.text_mean,
    )
    facts = fit_bridge("ridge", unnamed).facts
    # the chance is 1 in 64; unit rows are not quite a linear function of unit rows
    assert facts["bridge_recall_at_1"] > 0.6
    assert facts["bridge_chosen_by"] == "images"
    assert "bridge_zero_shot" not in facts


def test_too_few_pivots_are_refused():
    with pytest.raises(InvalidInput, match="50 distinct usable images, got 49"):
        fit_bridge("ridge", linear_pivots(49))
    alike = linear_pivots(64)
    alike.target[:] = alike.target[0]
    with pytest.raises(InvalidInput, match="50 distinct usable images, got 1:"):
        fit_bridge("mixture", alike)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model of images with centers, and one of images and texts; their weights are random."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "hf").mkdir()
    write_hf(tower(SIZES[1], activation="quick_gelu"), folder / "hf")
    plain = export_model(str(folder / "hf"), folder / "plain", name="eyes", reporter=SILENT)
    (folder / "two").mkdir()
    write_two_tower_checkpoint(folder / "two")
    export_model(str(folder / "two"), folder / "texts", name="words", reporter=SILENT)
    with Draft(folder / "images", plain.request()) as draft:
        for name in plain.files:
            shutil.copyfile(plain.file(name), draft.path / name)
        rows = unit(np.random.default_rng(0).normal(size=(3, plain.summary["dimension"])))
        centers = Centers(
            rows.astype(np.float32), np.array([1, 2, 3]), plain.fingerprint, names=("a", None, "c")
        )
        request = Request("centers", fingerprint=plain.fingerprint)
        with Draft(draft.path / "centers", request) as child:
            centers.write(child)
            child.publish()
        draft.publish(fingerprint=plain.fingerprint, summary=plain.summary)
    return folder


@pytest.fixture(scope="module")
def bridge(models, digits):
    """Bridges a model of images, by the digits, to the texts of another."""

    def make(spec, out, kind="ridge", text_from="texts"):
        texts, images = str(models / text_from), str(digits)
        return bridge_model(
            str(spec), out, text_from=texts, kind=kind, images=images, reporter=SILENT
        )

    return make


@pytest.fixture(scope="module", params=["mixture", "ridge"])
def bridged(request, models, bridge):
    return bridge(models / "images", models / request.param, request.param)


def test_the_images_stay_and_the_texts_are_in_their_space(models, bridged):
    before = open_artifact(models / "images", "model")
    assert bridged.config["name"] == "eyes"
    assert has_text(str(bridged.path))
    assert bridged.fingerprint != before.fingerprint
    assert bridged.summary["weights_digest"] == digest_of_both(
        before.summary["weights_digest"], text_digest(bridged.path / "text")
    )
    with (
        closing(open_encoder(str(before.path))) as old,
        closing(open_encoder(str(bridged.path))) as new,
        closing(open_text_encoder(str(bridged.path))) as texts,
    ):
        side = old.preprocess.crop
        pixels = np.random.default_rng(0).integers(0, 256, (2, 3, side, side), dtype=np.uint8)
        assert np.array_equal(old.encode(pixels), new.encode(pixels))
        assert new.fingerprint == texts.fingerprint == bridged.fingerprint
        rows = texts.encode(texts.tokenizer(["a photo of a cat", "two dogs"]))
        assert rows.shape == (2, new.dimension)
        assert np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(2), abs=1e-5)
    settings = json.loads((bridged.path / "text" / "config.json").read_text())
    assert settings["tower"] == bridged.summary["bridge"]


def test_its_quality_stands_in_the_manifest(bridged):
    facts = bridged.summary
    assert facts["bridge_held_out"] == 40
    assert facts["bridge_classes"] == 10
    assert 0 <= facts["bridge_zero_shot"] <= 1
    assert facts["bridge_recall_at_1"] <= facts["bridge_recall_at_5"]
    # another random tower's rows of the same digits: far above the chance of 10 / 40
    assert facts["bridge_recall_at_10"] > 0.5


def test_its_centers_go_along_with_the_new_fingerprint(models, bridged):
    before, after = (Centers.open(path / "centers") for path in (models / "images", bridged.path))
    assert np.array_equal(before.vectors, after.vectors)
    assert after.names == before.names
    assert after.fingerprint == bridged.fingerprint
    assert {finding.kind for finding in verify(bridged.path)} >= {"model", "images"}


def test_a_graph_in_int8_goes_along_with_its_figures(bridge, int8_model, tmp_path):
    made = bridge(int8_model, tmp_path / "bridged")
    before = open_artifact(int8_model, "model")
    assert made.summary["int8_mean_cosine"] == before.summary["int8_mean_cosine"]
    in_int8 = EncoderOptions(precision="int8")
    ours, theirs = (open_encoder(str(path), in_int8) for path in (made.path, int8_model))
    with closing(ours), closing(theirs):
        assert ours.precision == theirs.precision
        assert ours.fingerprint == made.fingerprint != theirs.fingerprint


def test_it_can_be_exported_again_with_its_facts(bridged, tmp_path):
    again = export_model(str(bridged.path), tmp_path / "again", name="eyes", reporter=SILENT)
    assert again.fingerprint == bridged.fingerprint
    facts = {key: value for key, value in bridged.summary.items() if key.startswith("bridge")}
    assert facts.items() <= again.summary.items()


def test_the_same_request_finds_what_is_there(models, bridged, bridge):
    again = bridge(models / "images", bridged.path, bridged.summary["bridge"])
    assert again.digest == bridged.digest


@pytest.mark.parametrize(
    ("spec", "text_from", "message"),
    [
        ("texts", "texts", "has a text tower already.*--no-text"),
        ("images", "images", "--text needs a model with a text tower"),
        ("hog", "texts", "needs a model artifact or weights, got hog"),
    ],
)
def test_models_that_do_not_fit_are_refused(models, bridge, tmp_path, spec, text_from, message):
    with pytest.raises(ConfigInvalid, match=message):
        bridge(spec if spec == "hog" else models / spec, tmp_path / "out", text_from=text_from)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "starter"], "--text needs --images"),
        (["--bridge", "ridge"], "--bridge requires --text"),
        (
            ["--text", "starter", "--images", "x", "--format", "hf"],
            "--text can only be combined with",
        ),
    ],
)
def test_options_without_effect_are_refused(tmp_path, options, message):
    done = CliRunner().invoke(export, ["model", str(tmp_path / "out"), *options])
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "least"), [("mixture", 0.8), ("ridge", 0.75)])
def test_real_photographs_are_recognized_by_name(
    starter, shared_data, wrapped_mobilenet, tmp_path, kind, least
):
    """MobileNetV2 with the starter's texts; 20 classes, so chance is 0.05."""
    artifact = bridge_model(
        str(wrapped_mobilenet),
        tmp_path / "out",
        text_from=str(starter),
        kind=kind,
        images=str(shared_data / "caltech101_20"),
        reporter=SILENT,
    )
    assert artifact.summary["bridge_zero_shot"] >= least


@pytest.fixture
def wrapped_mobilenet(shared_data, tmp_path) -> Path:
    """MobileNetV2 as a model artifact of images only."""
    out = tmp_path / "mobilenet"
    graph = GraphWriter()
    inner = onnx.load(shared_data / "encoders/mobilenet_v2_imagenet/mobilenet_v2_1.0_224.onnx")
    scale = graph.number(127.5)
    pixels = graph.add("Sub", graph.add("Cast", "image_u8", to=1), scale)
    features, _ = graph.include(
        inner, "mobilenet", {"pixel_values": graph.add("Div", pixels, scale)}
    )
    graph.rename(graph.unit_rows(features), "embedding")
    model = graph.model(
        inputs=[pixels_input(224)], outputs=[embedding_output(1280)], opset=opset_of(inner)
    )
    spec = PreprocessSpec(256, 224, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    with Draft(out, Request("model", {"name": "mobilenet"})) as draft:
        with draft.write("model.onnx") as path:
            onnx.save(model, path)
        with draft.write("preprocess.json") as path:
            path.write_text(spec.to_json())
        digest = hashlib.sha256(draft.path.joinpath("model.onnx").read_bytes()).hexdigest()
        summary = {"dimension": 1280, "weights_digest": digest}
        draft.publish(fingerprint=spec.fingerprint(digest), summary=summary)
    return out
