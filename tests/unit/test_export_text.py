"""The text part of a model artifact: both towers in one export, one fingerprint, one gate."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Request, open_artifact
from mlcd.cli import cli as command
from mlcd.encoders import has_text, open_encoder, open_text_encoder
from mlcd.encoders.local_text import open_text_part
from mlcd.encoders.options import EncoderOptions
from mlcd.encoders.token_batches import TokenBatches, batches
from mlcd.encoders.unit_rows import MAX_BATCH
from mlcd.errors import (
    ArtifactInvalid,
    ConfigInvalid,
    InvalidInput,
    NoTextTower,
    NotFound,
    Unavailable,
)
from mlcd.export import graph, text_tower
from mlcd.export.graph import write_graph
from mlcd.export.model_artifact import export_hf, export_model, find_weights
from mlcd.models import zoo
from mlcd.models.configs import clip_preprocessing
from mlcd.models.servable import Servable
from mlcd.models.text_part import FOLDER, TextSettings, digest_of_both, text_digest
from mlcd.models.two_tower_files import read_two_towers
from mlcd.models.vit import ViT, ViTConfig
from mlcd.pipelines.verify import verify
from mlcd.progress import Reporter
from tests.two_tower_models import CONTEXT, DIMENSION, write_two_tower_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SILENT = Reporter("silent")
TEXTS = [
    "a",
    "",
    "a photo of the cat",
    "two dogs and an old man in red sky at by with a a a a a a a",
    "the dog.",
]


@pytest.fixture(scope="module", autouse=True)
def graphs_once():
    """Writes the graph of each model once, because torch's exporter takes seconds."""
    made = {}

    def write(model, example, path, *, input_name, dims):
        state = model.state_dict().items()
        key = input_name, tuple((name, tensor.numpy().tobytes()) for name, tensor in state)
        if key not in made:
            write_graph(model, example, path, input_name=input_name, dims=dims)
            made[key] = path.read_bytes()
        path.write_bytes(made[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "write_graph", write)
        patch.setattr(text_tower, "write_graph", write)
        yield


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    (folder / "theirs").mkdir()
    theirs = write_two_tower_checkpoint(folder / "theirs")
    export_model(str(folder / "theirs"), folder / "model", name="m", reporter=SILENT)
    return folder, theirs


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A checkpoint of CLIP, which tests copy and change."""
    folder = tmp_path_factory.mktemp("clip")
    write_two_tower_checkpoint(folder)
    return folder


def their_rows(theirs, ids):
    with torch.no_grad():
        rows = theirs.get_text_features(input_ids=torch.from_numpy(ids)).pooler_output
    return torch.nn.functional.normalize(rows, dim=1).numpy()


def test_the_graph_is_onnx_as_others_read_it(exported):
    folder, _ = exported
    onnx.checker.check_model(folder / "model" / "text" / "model.onnx", full_check=True)


@pytest.mark.parametrize("engine", ["openvino", "torch"])
def test_each_engine_gives_transformers_rows(exported, engine):
    folder, theirs = exported
    encoder = open_text_encoder(str(folder / "model"), EncoderOptions(engine=engine))
    ids = encoder.tokenizer(TEXTS)
    rows = encoder.encode(ids)
    assert rows.dtype == np.float32
    assert rows == pytest.approx(their_rows(theirs, ids), abs=1e-5)
    alone = [encoder.encode(ids[number : number + 1]) for number in range(len(ids))]
    assert rows == pytest.approx(np.concatenate(alone), abs=1e-6)
    assert encoder.encode(ids[:0]).shape == (0, DIMENSION)
    assert (encoder.engine, encoder.precision) == (engine, "fp32")
    assert encoder.calibration.scale == pytest.approx(np.exp(2.0))
    assert encoder.calibration.bias is None
    encoder.close()
    encoder.close()
    with pytest.raises(Unavailable, match="closed"):
        encoder.encode(ids)


@pytest.mark.parametrize("options", [{}, {"exif": "ignore"}])
def test_images_and_texts_are_of_one_model(exported, options):
    model, options = str(exported[0] / "model"), EncoderOptions(**options)
    with (
        closing(open_encoder(model, options)) as images,
        closing(open_text_encoder(model, options)) as texts,
    ):
        assert texts.fingerprint == images.fingerprint
        assert texts.name == images.name == "m"
        assert texts.dimension == images.dimension == DIMENSION
    stated = open_artifact(Path(model)).fingerprint
    assert (texts.fingerprint == stated) == (options == EncoderOptions())


@pytest.mark.parametrize("engine", ["openvino", "torch"])
def test_what_is_no_batch_of_ids_is_refused(exported, engine):
    encoder = open_text_encoder(str(exported[0] / "model"), EncoderOptions(engine=engine))
    long = np.zeros((1, CONTEXT + 1), np.int64)
    for ids in (long, long[0], np.zeros((1, 3), np.int32), np.zeros((1, 0), np.int64)):
        with pytest.raises(InvalidInput, match="expected int64 token ids"):
            encoder.encode(ids)


def test_the_manifest_states_the_part_and_its_parity(exported):
    artifact = open_artifact(exported[0] / "model", "model")
    names = ["config.json", "model.onnx", "model.safetensors", "tokenizer.json"]
    assert {f"{FOLDER}/{name}" for name in names} < artifact.files.keys()
    assert artifact.config == {"name": "m", "text": True}
    assert artifact.summary["text_parity_captions"] == 34
    assert artifact.summary["text_parity_min_cosine"] > 0.9999
    settings = TextSettings.read(artifact.path / FOLDER)
    assert (settings.tower, settings.trims_padding) == ("clip", True)
    assert next(iter(verify(artifact.path))).detail.startswith(f"{len(artifact.files)} files")


def test_the_fingerprint_covers_both_towers(exported, tmp_path):
    folder, _ = exported
    model = open_artifact(folder / "model")
    alone = export_model(
        str(folder / "theirs"), tmp_path / "alone", name="m", text=False, reporter=SILENT
    )
    assert not has_text(str(alone.path))
    assert alone.fingerprint == zoo.load(str(folder / "theirs")).fingerprint()
    assert alone.config == {"name": "m"}
    digest = digest_of_both(alone.summary["weights_digest"], text_digest(model.path / FOLDER))
    assert model.summary["weights_digest"] == digest
    preprocess = zoo.load(str(folder / "theirs")).preprocess
    assert model.fingerprint == preprocess.fingerprint(digest)
    again = export_model(str(model.path), tmp_path / "again", name="m", reporter=SILENT)
    assert again.fingerprint == model.fingerprint


def test_another_temperature_is_another_model(clip, tmp_path):
    first = export_model(str(clip), tmp_path / "first", name="m", reporter=SILENT)
    theirs = tmp_path / "theirs"
    shutil.copytree(clip, theirs)
    state = load_file(theirs / "model.safetensors")
    save_file(state | {"logit_scale": torch.tensor(3.0)}, theirs / "model.safetensors")
    second = export_model(str(theirs), tmp_path / "second", name="m", reporter=SILENT)
    assert first.fingerprint != second.fingerprint


# of the model that `test_a_model_of_images_alone_stays_what_it_was` exports
VISION_ONLY = "9c99d983a83ccd27872b0eba4e8934eb3529f7e9488432986fcaeb744d27322e"


def test_a_model_of_images_alone_stays_what_it_was(tmp_path):
    config = ViTConfig(16, 8, 32, 2, 2, 64, 16)
    trunk = ViT(config)
    with torch.no_grad():
        for number, (_, parameter) in enumerate(sorted(trunk.named_parameters())):
            values = torch.arange(parameter.numel(), dtype=torch.float32) % (7 + number)
            parameter.copy_((values / 16 - 0.2).reshape(parameter.shape))
    (tmp_path / "weights").mkdir()
    Servable(trunk, clip_preprocessing(16)).write(tmp_path / "weights")
    artifact = export_model(str(tmp_path / "weights"), tmp_path / "m", name="m", reporter=SILENT)
    assert artifact.fingerprint == VISION_ONLY
    assert artifact.config == {"name": "m"}
    assert artifact.files.keys() == {
        "config.json", "model.onnx", "model.safetensors", "preprocess.json"
    }  # fmt: skip
    assert artifact.summary.keys() == {
        "dimension", "parity_images", "parity_measured", "parity_min_cosine", "parity_source",
        "weights_digest",
    }  # fmt: skip
    with pytest.raises(NoTextTower, match="embedding texts needs a text tower"):
        open_text_encoder(str(artifact.path))


@pytest.mark.parametrize("spec", ["hog", "pixels"])
def test_classical_features_have_no_texts(spec):
    assert not has_text(spec)
    with pytest.raises(NoTextTower):
        open_text_encoder(spec)


def test_a_model_that_is_not_there_is_not_found(tmp_path):
    with pytest.raises(NotFound):
        open_text_encoder(str(tmp_path / "none"))


def test_a_text_part_without_weights_runs_on_openvino_alone(exported, tmp_path):
    model, part = tmp_path / "model", tmp_path / "model" / FOLDER
    shutil.copytree(exported[0] / "model", model)
    manifest = open_artifact(model)
    (part / "model.safetensors").unlink()
    with Draft(tmp_path / "bare", Request("model", manifest.config)) as draft:
        for name in manifest.files.keys() - {f"{FOLDER}/model.safetensors"}:
            with draft.write(name) as path:
                shutil.copyfile(model / name, path)
        draft.publish(fingerprint=manifest.fingerprint, summary=manifest.summary)
    bare = str(tmp_path / "bare")
    assert open_text_encoder(bare).engine == "openvino"
    with pytest.raises(ConfigInvalid, match="use engine openvino"):
        open_text_encoder(bare, EncoderOptions(engine="torch"))
    again = export_model(bare, tmp_path / "again", name="m", reporter=SILENT)
    assert again.summary["text_parity_min_cosine"] == manifest.summary["text_parity_min_cosine"]
    with pytest.raises(ConfigInvalid, match="--no-text"):
        export_hf(bare, tmp_path / "hf", name="m", reporter=SILENT)


def test_a_graph_of_other_texts_is_not_published(clip, tmp_path, monkeypatch):
    original = text_tower.write_text_onnx

    def wrong(model, context_length, path):
        original(model, context_length, path)
        with torch.no_grad():
            model.trunk.pos.add_(torch.randn(model.trunk.pos.shape))

    monkeypatch.setattr(text_tower, "write_text_onnx", wrong)
    with pytest.raises(ArtifactInvalid, match="on a caption"):
        export_model(str(clip), tmp_path / "model", name="m", reporter=SILENT)
    assert not (tmp_path / "model").exists()


def test_a_changed_tokenizer_is_found(exported, tmp_path):
    shutil.copytree(exported[0] / "model", tmp_path / "model")
    path = tmp_path / "model" / FOLDER / "tokenizer.json"
    path.write_text(path.read_text().replace("dogs", "cogs"))
    with pytest.raises(ArtifactInvalid, match=r"tokenizer\.json differs"):
        list(verify(tmp_path / "model"))
    with pytest.raises(ArtifactInvalid, match=r"tokenizer\.json differs"):
        open_text_encoder(str(tmp_path / "model"))


def test_a_directory_without_a_tokenizer_is_a_model_of_images(clip, tmp_path):
    shutil.copytree(clip, tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").unlink()
    done = CliRunner().invoke(command, ["export", str(tmp_path / "theirs"), str(tmp_path / "m")])
    assert (done.exit_code, done.output.count("no tokenizer.json")) == (0, 1)
    assert "AutoTokenizer.from_pretrained(NAME).save_pretrained" in done.output
    assert not has_text(str(tmp_path / "m"))


@pytest.mark.parametrize("options", [{"projection": False}, {"like": "openai-vit-base-patch32"}])
def test_images_of_another_space_come_without_texts(clip, tmp_path, options):
    assert find_weights(str(clip), tmp_path / "m", zoo.LoadOptions(**options)).text is None


def test_a_text_tower_that_cannot_be_read_can_be_left_out(clip, tmp_path):
    theirs = tmp_path / "theirs"
    shutil.copytree(clip, theirs)
    (theirs / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ArtifactInvalid, match=r"name the padding token.* or omit .* --no-text"):
        export_model(str(theirs), tmp_path / "model", name="m", reporter=SILENT)
    export_model(str(theirs), tmp_path / "m", name="m", text=False, reporter=SILENT)


def test_a_tokenizer_of_more_tokens_than_the_tower_is_refused(clip, tmp_path):
    theirs = tmp_path / "theirs"
    shutil.copytree(clip, theirs)
    content = json.loads((theirs / "tokenizer.json").read_text())
    content["model"]["vocab"]["zebra"] = 40
    (theirs / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigInvalid, match="40 tokens, got 41"):
        export_model(str(theirs), tmp_path / "model", name="m", reporter=SILENT)


def test_transformers_loads_both_towers_again(exported, tmp_path):
    folder, theirs = exported
    for source in ("theirs", "model"):
        made = export_hf(str(folder / source), tmp_path / source, name="m", reporter=SILENT)
        assert made.fingerprint == open_artifact(folder / "model").fingerprint
        out = made.path
        again = transformers.AutoModel.from_pretrained(out).eval()
        ids = read_two_towers(str(out)).tokenizer(TEXTS)
        assert their_rows(again, ids) == pytest.approx(their_rows(theirs, ids), abs=1e-6)
    alone = export_hf(
        str(folder / "model"), tmp_path / "alone", name="m", text=False, reporter=SILENT
    )
    assert "tokenizer.json" not in alone.files


def test_the_command_writes_and_leaves_out_the_texts(clip, tmp_path):
    runner = CliRunner()
    both = runner.invoke(command, ["export", str(clip), str(tmp_path / "both")])
    assert both.exit_code == 0, both.output
    assert "text parity 1.0000" in both.output or "text parity 0.9999" in both.output
    alone = runner.invoke(command, ["export", str(clip), str(tmp_path / "alone"), "--no-text"])
    assert alone.exit_code == 0, alone.output
    assert (has_text(str(tmp_path / "both")), has_text(str(tmp_path / "alone"))) == (True, False)


def test_batches_are_of_like_length_and_hold_every_row_once():
    lengths = np.random.default_rng(0).integers(1, 78, 500)
    found = batches(lengths)
    assert sorted(np.concatenate(found).tolist()) == list(range(500))
    assert max(map(len, found)) <= MAX_BATCH
    padded = sum(len(batch) * lengths[batch].max() for batch in found)
    assert padded < 1.1 * lengths.sum()
    # the one long text does not make the short ones long
    assert [batch.tolist() for batch in batches(np.array([5, 77, 5]))] == [[0, 2], [1]]
    assert [batch.tolist() for batch in batches(np.array([5, 6, 7]))] == [[0, 1, 2]]
    assert batches(np.array([], np.int64)) == []


def test_padding_is_cut_where_the_tower_does_not_see_it(clip, tmp_path):
    part = open_text_part(export_model(str(clip), tmp_path / "m", name="m", reporter=SILENT))
    rows = part.tokenizer(["", "a", "a cat " * 20])
    assert TokenBatches(part.settings, part.tokenizer).lengths(rows).tolist() == [2, 3, CONTEXT]
    bidirectional = part.settings.model_copy(update={"trims_padding": False})
    lengths = TokenBatches(bidirectional, part.tokenizer).lengths(rows)
    assert lengths.tolist() == [CONTEXT] * 3
