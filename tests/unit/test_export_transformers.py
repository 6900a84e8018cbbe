"""Towers that transformers reads: the exported graphs beside the library's own classes."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_sample_images

from mlcd.commands.export_model import export as export_command
from mlcd.encoders import open_encoder, open_text_encoder
from mlcd.errors import ArtifactInvalid, ConfigInvalid
from mlcd.export import libraries
from mlcd.export.model_artifact import export_hf, export_model
from mlcd.export.triton import export_triton
from mlcd.models.zoo import LoadOptions
from mlcd.progress import Reporter
from tests.models.transformers_models import (
    CASES,
    CONTEXT,
    SIDE,
    VISION,
    open_processor,
    write_model,
)

t = pytest.importorskip("transformers")
SILENT = Reporter("silent")
ROOT = Path(__file__).resolve().parents[2]
LATER = ("convnextv2", "mobilenet_v2", "swin", "vit")  # the path of others
TEXTS = ["a photo of a cat", "two dogs", "", "an old man on a red sky " * 9]


def export(folder, out, *, text=True, **options):
    return export_model(
        str(folder), out, name="m", options=LoadOptions(**options), text=text, reporter=SILENT
    )


def rewrite(path, **fields):
    """Changes fields of a JSON file; None removes one."""
    content = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: x for key, x in content.items() if x is not None}))


def photographs(*, square):
    for picture in load_sample_images().images:
        side = min(picture.shape[:2]) if square else None
        yield Image.fromarray(picture[:side, :side])


def rows_of(output):
    """Returns unit rows of a library's output."""
    rows = output if isinstance(output, torch.Tensor) else output.pooler_output
    return torch.nn.functional.normalize(rows.flatten(1), dim=1).numpy()


def cosines(rows, expected):
    return (rows.astype(np.float64) * expected).sum(axis=1)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LATER)) for name in CASES]
)
def test_a_graph_gives_the_rows_of_the_library(name, tmp_path):
    """Beside the library's own image processor, model and tokenizer, which only read the files."""
    case = CASES[name]
    write_model(case, tmp_path / "files")
    artifact = export(tmp_path / "files", tmp_path / "model", library="transformers")
    model = t.AutoModel.from_pretrained(tmp_path / "files").eval()
    encoder = open_encoder(str(tmp_path / "model"))
    assert artifact.summary["class"] == type(model).__name__
    assert artifact.summary["parity_min_cosine"] > 0.9999
    has_texts = case.texts is not None
    embed = model.get_image_features if has_texts else model
    # for NaFlex the fixed size is the library's grid of a square image
    for image in photographs(square=name == "siglip2"):
        with torch.inference_mode():
            expected = rows_of(embed(**open_processor(case)(image, return_tensors="pt")))
        ours = encoder.encode(encoder.preprocess.apply(image)[None])
        assert cosines(ours, expected)[0] > 0.9999
    assert has_texts == (tmp_path / "model" / "text").is_dir()
    if not has_texts:
        return
    texts = open_text_encoder(str(tmp_path / "model"))
    tokens = texts.tokenizer.tokenize(TEXTS)
    mask = torch.arange(CONTEXT) < torch.from_numpy(tokens.num)[:, None]
    masked = {} if case.texts == "siglip" else {"attention_mask": mask.long()}
    with torch.inference_mode():
        ids = torch.from_numpy(tokens.ids)
        expected = rows_of(model.get_text_features(input_ids=ids, **masked))
    assert cosines(texts.encode(tokens.ids), expected).min() > 0.9999
    assert texts.calibration.scale == pytest.approx(np.exp(2.0))
    assert (texts.calibration.bias is None) == (case.texts != "siglip")


@pytest.fixture(scope="module")
def dinov2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dinov2") / "files"
    write_model(CASES["dinov2_with_registers"], folder)
    return folder


@pytest.fixture
def copy_of(dinov2, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for path in dinov2.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_the_config_names_the_reader(dinov2, tmp_path):
    artifact = export(dinov2, tmp_path / "a")
    assert artifact.summary["library"].startswith("transformers ")
    assert "model.safetensors" not in artifact.files
    write_model(CASES["clip"], tmp_path / "clip")
    assert "model.safetensors" in export(tmp_path / "clip", tmp_path / "b", text=False).files
    (tmp_path / "clip" / "tokenizer.json").unlink()
    traced = export(tmp_path / "clip", tmp_path / "c", library="transformers")
    assert traced.summary["class"] == "CLIPModel"
    assert not (tmp_path / "c" / "text").exists()  # without its tokenizer


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_pooling_is_of_tokens_without_registers(pooling, dinov2, tmp_path):
    export(dinov2, tmp_path / "model", pooling=pooling)
    model = t.AutoModel.from_pretrained(dinov2).eval()
    encoder = open_encoder(str(tmp_path / "model"))
    (image, _) = photographs(square=False)
    pixels = open_processor(CASES["dinov2"])(image, return_tensors="pt")
    with torch.inference_mode():
        (tokens,) = model(**pixels).last_hidden_state
    assert len(tokens) == 1 + 4 + (SIDE // 8) ** 2
    row = {"cls": tokens[0], "mean": tokens[5:].mean(dim=0), "last": tokens[-1]}[pooling]
    ours = encoder.encode(encoder.preprocess.apply(image)[None])
    assert cosines(ours, rows_of(row[None]))[0] > 0.9999


def test_each_choice_is_another_fingerprint(dinov2, tmp_path):
    prints = {
        export(dinov2, tmp_path / str(number), **options).fingerprint
        for number, options in enumerate([{}, {"pooling": "cls"}])
    }
    assert len(prints) == 2
    again = export(dinov2, tmp_path / "again", library="transformers")
    assert again.fingerprint in prints


def test_another_size_is_the_library_s_own_resize(dinov2, tmp_path):
    export(dinov2, tmp_path / "model", image_size=48)
    model = t.AutoModel.from_pretrained(dinov2).eval()
    encoder = open_encoder(str(tmp_path / "model"))
    size = {"height": 48, "width": 48}
    processor = t.CLIPImageProcessorPil(size={"shortest_edge": 48}, crop_size=size)
    (image, _) = photographs(square=False)
    with torch.inference_mode():
        expected = rows_of(model(**processor(image, return_tensors="pt")))
    assert cosines(encoder.encode(encoder.preprocess.apply(image)[None]), expected)[0] > 0.9999


def test_a_pooling_layer_without_weights_is_not_used(tmp_path):
    """AutoModel draws one at random, as for the files of ViTForImageClassification."""
    write_model(CASES["vit"], tmp_path / "files")
    path = tmp_path / "files" / "model.safetensors"
    state = {name: x for name, x in load_file(path).items() if "pooler" not in name}
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(ConfigInvalid, match="one row per image: choose the pooling with --pooling"):
        export(tmp_path / "files", tmp_path / "model")
    assert export(tmp_path / "files", tmp_path / "model", pooling="cls").summary["dimension"] == 32


def test_a_projection_that_the_class_has_is_kept(tmp_path):
    """AutoModel reads these files without it."""
    config = t.MetaClip2VisionConfig(**VISION, projection_dim=20)
    model = t.MetaClip2VisionModelWithProjection(config).eval()
    model.save_pretrained(tmp_path / "files")
    open_processor(CASES["clip"]).save_pretrained(tmp_path / "files")
    export(tmp_path / "files", tmp_path / "model")
    encoder = open_encoder(str(tmp_path / "model"))
    (image, _) = photographs(square=False)
    with torch.inference_mode():
        output = model(**open_processor(CASES["clip"])(image, return_tensors="pt"))
    ours = encoder.encode(encoder.preprocess.apply(image)[None])
    assert ours.shape == (1, 20)
    assert cosines(ours, rows_of(output.image_embeds))[0] > 0.9999


def test_damaged_files_are_refused_by_name(copy_of, tmp_path):
    path = copy_of / "model.safetensors"
    state = load_file(path)
    name = "encoder.layer.0.norm1.weight"

    def fail(match, error=ArtifactInvalid):
        with pytest.raises(error, match=match):
            export(copy_of, tmp_path / "model")
        assert not (tmp_path / "model").exists()

    save_file({key: x for key, x in state.items() if key != name}, path, metadata={"format": "pt"})
    fail(f"{name} is missing from")
    save_file({**state, name: state[name] * float("nan")}, path, metadata={"format": "pt"})
    fail(f"{name} in .* must be finite")
    save_file({**state, name: state[name][:3].clone()}, path, metadata={"format": "pt"})
    fail("cannot be read by transformers")
    path.write_bytes(path.read_bytes()[:1000])
    fail("cannot be read by transformers")
    rewrite(copy_of / "config.json", hidden_size="wide")
    fail("config.json cannot be read by transformers: .*hidden_size", ConfigInvalid)
    rewrite(copy_of / "config.json", model_type=["dinov2"])
    fail("config.json cannot be read by transformers", ConfigInvalid)
    path.unlink()
    torch.save(state, copy_of / "pytorch_model.bin")
    fail("must be in model.safetensors", ConfigInvalid)


def test_no_code_of_the_files_runs(copy_of, tmp_path):
    (copy_of / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    auto = {"AutoConfig": "own.Config", "AutoModel": "own.Model"}
    rewrite(copy_of / "config.json", auto_map=auto, model_type="own")
    with pytest.raises(ConfigInvalid, match="cannot be read by transformers"):
        export(copy_of, tmp_path / "model")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"resample": 1}, "resample must be 2 or 3, got"),
        ({"do_rescale": False}, "do_rescale must be true, got False"),
        ({"rescale_factor": 1 / 127.5}, "rescale_factor must be 1/255"),
        ({"do_center_crop": False}, "do_center_crop must be true with size.shortest_edge"),
        ({"crop_size": {"height": 32, "width": 24}}, "crop_size must be a square"),
        ({"image_mean": [0.5]}, "image_mean must be three numbers"),
        ({"do_pad": True}, "do_pad must be false, got True"),
        ({"image_processor_type": "LevitImageProcessor"}, "does more than its fields say"),
    ],
)
def test_preprocessing_that_cannot_be_repeated_is_refused(fields, message, copy_of, tmp_path):
    rewrite(copy_of / "preprocessor_config.json", **fields)
    with pytest.raises(ConfigInvalid, match=message):
        export(copy_of, tmp_path / "model")


def test_the_fields_count_where_the_class_needs_torchvision(copy_of, tmp_path):
    size = {"height": SIDE, "width": SIDE}
    fields = {"size": size, "crop_size": None, "do_center_crop": None, "resample": 2}
    kind = "DINOv3ViTImageProcessor"
    rewrite(copy_of / "preprocessor_config.json", image_processor_type=kind, **fields)
    artifact = export(copy_of, tmp_path / "model")
    assert artifact.summary["preprocessing_compared"] == (find_spec("torchvision") is not None)
    preprocess = open_encoder(str(tmp_path / "model")).preprocess
    assert (preprocess.resize, preprocess.interpolation) == ("square", "bilinear")
    assert (preprocess.crop, preprocess.resize_shortest) == (SIDE, SIDE)


def test_missing_preprocessing_can_be_stated(copy_of, tmp_path):
    (copy_of / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigInvalid, match="--preprocess clip"):
        export(copy_of, tmp_path / "model")
    export(copy_of, tmp_path / "model", clip_preprocessing=True)


def test_a_graph_without_weights_goes_to_triton_and_nowhere_else(tmp_path):
    write_model(CASES["metaclip_2"], tmp_path / "files")
    model = export(tmp_path / "files", tmp_path / "model")
    with pytest.raises(ConfigInvalid, match="graphs without weights"):
        export(tmp_path / "model", tmp_path / "again")
    with pytest.raises(ConfigInvalid, match="mlcd exports graphs alone"):
        export_hf(str(tmp_path / "files"), tmp_path / "hf", name="m", reporter=SILENT)
    for number, spec in enumerate(["files", "model"]):
        out = tmp_path / f"triton-{number}"
        version = export_triton(str(tmp_path / spec), out, name="m", reporter=SILENT)
        assert version.fingerprint == model.fingerprint
        assert version.summary["parity_min_cosine"] > 0.9999
        assert (out / "m-text" / "1" / "model.onnx").is_file()
    again = export_triton(str(tmp_path / "model"), out, name="m", reporter=SILENT)
    assert again.digest == version.digest


def test_a_missing_library_is_named_with_its_extra(dinov2, tmp_path, monkeypatch):
    monkeypatch.setattr(
        libraries, "find_spec", lambda name: None if name == "transformers" else find_spec(name)
    )
    with pytest.raises(ConfigInvalid, match=r"needs the package transformers.*\[models\]"):
        export(dinov2, tmp_path / "model")


@pytest.mark.skipif(find_spec("timm") is not None, reason="timm is installed, and works")
def test_a_library_that_cannot_be_imported_is_one_line(dinov2, tmp_path, monkeypatch):
    (tmp_path / "timm.py").write_text("raise RuntimeError('torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigInvalid, match=r"nms does not exist: .*torchvision of one build"):
        export(dinov2, tmp_path / "model", library="timm")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pooling", "map"], "lacks attention pooling: use --pooling cls, mean or last"),
        (["--with", "timm"], "architecture" if find_spec("timm") else "needs the package timm"),
        (["--like", "openai-vit-base-patch32", "--with", "transformers"], "--like is for bare"),
        (["--format", "hf"], "of which mlcd exports graphs alone"),
    ],
)
def test_wrong_options_are_one_line(arguments, message, dinov2, tmp_path):
    result = CliRunner().invoke(export_command, [str(dinov2), str(tmp_path / "m"), *arguments])
    assert isinstance(result.exception, ConfigInvalid)
    assert message in str(result.exception)


def test_the_command_says_what_it_read(dinov2, tmp_path):
    out = str(tmp_path / "m")
    result = CliRunner().invoke(export_command, [str(dinov2), out, "--pooling", "cls"])
    assert result.output.startswith("model of dimension 32, parity 1.0000")


def test_the_page_lists_every_architecture():
    """`make test-models` measures the table's cosines anew."""
    page = (ROOT / "docs" / "how-to" / "bring-weights.md").read_text()
    assert [case.title for case in CASES.values() if f"\n|{case.title}|" not in page] == []
