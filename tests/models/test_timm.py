"""Towers that timm reads: the exported graphs beside the library's own classes."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_sample_images

from mlcd.encoders import open_encoder
from mlcd.errors import ArtifactInvalid, ConfigInvalid
from mlcd.export.model_artifact import export_model
from mlcd.models.zoo import LoadOptions
from mlcd.progress import Reporter
from tests.models.timm_models import CASES, write_model

SILENT = Reporter("silent")


def export(folder, out, **options):
    return export_model(str(folder), out, name="m", options=LoadOptions(**options), reporter=SILENT)


def cosine(ours, model, pixels):
    with torch.inference_mode():
        rows = torch.nn.functional.normalize(model(pixels[None]), dim=1).numpy()
    return float((ours.astype(np.float64) * rows).sum())


@pytest.mark.parametrize("name", CASES)
def test_a_graph_gives_the_rows_of_the_library(name, tmp_path):
    """Beside timm's own transform and model."""
    model = write_model(CASES[name], tmp_path / "files")
    artifact = export(tmp_path / "files", tmp_path / "model")
    assert artifact.summary["library"] == f"timm {timm.__version__}"
    assert artifact.summary["class"] == name
    assert artifact.summary["parity_min_cosine"] > 0.9999
    encoder = open_encoder(str(tmp_path / "model"))
    config = timm.data.resolve_data_config({}, model=model)
    transform = timm.data.create_transform(**config)
    for picture in load_sample_images().images:
        # square, because torchvision's center of an odd margin is a pixel beside ours
        image = Image.fromarray(picture[:400, :400])
        ours = encoder.encode(encoder.preprocess.apply(image)[None])
        assert cosine(ours, model, transform(image)) > 0.9999


@pytest.fixture(scope="module")
def siglip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("siglip") / "files"
    write_model(CASES["vit_base_patch16_siglip_224"], folder)
    return folder


def test_attention_pooling_can_be_named_and_others_lack_weights(siglip, tmp_path):
    export(siglip, tmp_path / "model", pooling="map")
    with pytest.raises(ConfigInvalid, match="use --pooling cls, mean or map"):
        export(siglip, tmp_path / "last", pooling="last")


def test_pooling_of_patches_is_the_library_s(tmp_path):
    case = CASES["vit_small_patch16_dinov3"]
    write_model(case, tmp_path / "files")
    export(tmp_path / "files", tmp_path / "model", pooling="cls")
    state = load_file(tmp_path / "files" / "model.safetensors")
    arguments = {**case.arguments, "global_pool": "token", "num_classes": 0}
    model = timm.create_model(case.architecture, **arguments).eval()
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    pixels = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8)
    encoder = open_encoder(str(tmp_path / "model"))
    mean, std = (
        torch.tensor(x)[:, None, None] for x in (encoder.preprocess.mean, encoder.preprocess.std)
    )
    ours = encoder.encode(pixels.numpy())
    assert cosine(ours, model, (pixels[0].float() / 255 - mean) / std) > 0.9999


@pytest.mark.parametrize("name", ["vit_base_patch16_siglip_224", "resnet18"])
def test_another_size(name, tmp_path):
    write_model(CASES[name], tmp_path / "files")
    export(tmp_path / "files", tmp_path / "model", image_size=96)
    assert open_encoder(str(tmp_path / "model")).preprocess.crop == 96


def test_damaged_files_are_refused_by_name(tmp_path):
    folder = tmp_path / "files"
    write_model(CASES["resnet18"], folder)
    path = folder / "model.safetensors"
    state = load_file(path)

    def fail(match, error=ArtifactInvalid):
        with pytest.raises(error, match=match):
            export(folder, tmp_path / "model")
        assert not (tmp_path / "model").exists()

    save_file({key: x for key, x in state.items() if key != "conv1.weight"}, path)
    fail(r'does not fit resnet18: .*"conv1.weight"')
    save_file({**state, "conv1.weight": state["conv1.weight"] * float("nan")}, path)
    fail("conv1.weight in .* must be finite")
    path.unlink()
    torch.save(state, folder / "pytorch_model.bin")
    fail("must be in model.safetensors", ConfigInvalid)
    config = (folder / "config.json").read_text()
    path.write_bytes(b"cut")
    fail("does not fit|cannot be read")
    (folder / "config.json").write_text(config.replace("resnet18", "resnet_of_nobody"))
    fail("architecture must be a model of timm", ConfigInvalid)
    save_file(state, path)
    for wrong, message in (
        (config.replace('"bilinear"', '"lanczos"'), "interpolation must be bicubic or bilinear"),
        (config.replace('"center"', '"border"'), "crop_mode must be 'center'"),
        (config.replace("[3, 64, 64]", "[3, 64, 32]"), "input_size must be a square"),
    ):
        (folder / "config.json").write_text(wrong)
        fail(message, ConfigInvalid)
