"""Any weights that a user names, served: exported once, in a process of its own, into the cache."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Request, open_artifact
from mlcd.encoders import open_encoder
from mlcd.encoders.options import EncoderOptions
from mlcd.errors import ArtifactInvalid, ConfigInvalid, InvalidInput, NotFound
from mlcd.export import model_artifact as export
from mlcd.models import zoo
from mlcd.models.zoo import LoadOptions
from mlcd.pipelines import resolve
from mlcd.pipelines.resolve import resolve_model
from mlcd.pipelines.verify import verify
from mlcd.progress import Reporter
from tests.unit.models.test_checkpoints import SIZES, tower, write_hf

SILENT = Reporter("silent")


@pytest.fixture
def weights(tmp_path):
    folder = tmp_path / "towers" / "tiny tower"
    folder.mkdir(parents=True)
    write_hf(tower(SIZES[1], activation="quick_gelu"), folder)
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A tiny tower, and its exports with images turned as they say and as they are stored."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "weights").mkdir()
    write_hf(tower(SIZES[1], activation="quick_gelu"), folder / "weights")
    for exif in ("apply", "ignore"):
        options = LoadOptions(exif=exif)
        out = folder / exif
        export.export_model(
            str(folder / "weights"), out, name="m", options=options, reporter=SILENT
        )
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def embedding(spec, seed=0):
    encoder = open_encoder(spec)
    size = encoder.preprocess.crop
    images = np.random.default_rng(seed).integers(0, 256, (3, 3, size, size), dtype=np.uint8)
    try:
        return images, encoder.encode(images)
    finally:
        encoder.close()


TWO_AT_ONCE = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from mlcd.pipelines.resolve import resolve_model
said = []
with ThreadPoolExecutor(2) as pool:
    places = set(pool.map(lambda _: resolve_model(sys.argv[1], said.append), range(2)))
print(json.dumps([list(places), said, "torch" in sys.modules]))
"""


def test_weights_are_exported_once_and_served_as_they_are(weights, cache, monkeypatch):
    """Two ask for them at once, in a process that never loads torch."""
    command = [sys.executable, "-c", TWO_AT_ONCE, str(weights)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (first,), said, has_torch = json.loads(done.stdout)
    assert (len(said), has_torch) == (1, False)
    assert Path(first).is_relative_to(cache)
    assert Path(first).name.startswith("tiny-tower-")
    images, served = embedding(first)
    with torch.inference_mode():
        expected = zoo.load(str(weights))(torch.from_numpy(images)).numpy()
    assert np.abs(served - expected).max() < 1e-5
    assert resolve_model(str(weights), said.append) == resolve_model(first) == first
    assert len(said) == 1
    config = json.loads((weights / "config.json").read_text()) | {"hidden_act": "gelu"}
    (weights / "config.json").write_text(json.dumps(config))
    asked = []
    monkeypatch.setattr(resolve, "_export", lambda _, out, *rest: asked.append(str(out)))
    assert [resolve_model(str(weights))] == asked != [first]


def test_a_run_is_exported_too(journey, cache):
    path = resolve_model(str(journey / "run"))
    assert (Path(path) / "centers").is_dir()
    assert embedding(path)[1].shape[0] == 3


def test_a_cache_that_cannot_be_written_is_named(weights, cache):
    cache.write_text("no directory")
    with pytest.raises(InvalidInput, match="name another cache with XDG_CACHE_HOME"):
        resolve_model(str(weights))


def test_what_needs_no_export_is_left_alone(tmp_path):
    for spec in ("hog", "pixels", str(tmp_path / "model.onnx")):
        assert resolve_model(spec) == spec


def test_the_export_s_own_words_reach_the_user(weights, cache, tmp_path, monkeypatch):
    (weights / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigInvalid, match="--preprocess clip"):
        resolve_model(str(weights))
    with pytest.raises(NotFound, match="does not exist"):
        resolve_model(str(tmp_path / "nothing"))
    monkeypatch.setattr(resolve.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigInvalid, match="torch is not installed"):
        resolve_model(str(weights))


def test_the_export_for_transformers_reads_back_as_the_same_model(weights, tmp_path):
    artifact = export.export_hf(str(weights), tmp_path / "hf", name="m", reporter=SILENT)
    assert (
        artifact.fingerprint
        == zoo.load(str(tmp_path / "hf")).fingerprint()
        == zoo.load(str(weights)).fingerprint()
    )
    from transformers import AutoImageProcessor, CLIPVisionModel

    model = CLIPVisionModel.from_pretrained(tmp_path / "hf")
    assert model.config.hidden_act == "quick_gelu"
    processor = AutoImageProcessor.from_pretrained(tmp_path / "hf", use_fast=False)
    assert processor.crop_size["height"] == 32
    assert (
        load_file(tmp_path / "hf" / "model.safetensors").keys()
        == load_file(weights / "model.safetensors").keys()
    )


def test_a_rotary_tower_with_a_projection_has_no_class_in_transformers(tmp_path):
    trunk = tower((16, 4, 32, 1, 2, 64, 8), positions="rope")
    model = tmp_path / "model"
    model.mkdir()
    from mlcd.images.transform import PreprocessSpec
    from mlcd.models.servable import Servable

    Servable(trunk, PreprocessSpec(16, 16)).write(model)
    with pytest.raises(ConfigInvalid, match="--no-projection"):
        export.export_hf(str(model), tmp_path / "hf", name="m", reporter=SILENT)
    export.export_hf(
        str(model),
        tmp_path / "hf",
        name="m",
        options=LoadOptions(projection=False),
        reporter=SILENT,
    )


def test_options_are_part_of_what_was_asked_and_no_option_changes_a_checkpoint(
    exported, journey, tmp_path
):
    plain, other = (open_artifact(exported / exif) for exif in ("apply", "ignore"))
    assert plain.fingerprint != other.fingerprint
    assert plain.summary["weights_digest"] == other.summary["weights_digest"]
    with pytest.raises(ConfigInvalid, match="has its own config and preprocessing"):
        export.export_model(
            str(journey / "run"),
            tmp_path / "c",
            name="m",
            options=LoadOptions(projection=False),
            reporter=SILENT,
        )


@pytest.mark.slow
def test_verify_walks_back_to_the_weights(weights, tmp_path):
    export.export_model(str(weights), tmp_path / "model", name="m", reporter=SILENT)
    assert [finding.kind for finding in verify(tmp_path / "model")] == ["model", "weights"]
    write_hf(tower(SIZES[1], seed=3), weights)
    from mlcd.errors import ArtifactInvalid

    with pytest.raises(ArtifactInvalid, match="does not contain the weights"):
        list(verify(tmp_path / "model"))


def test_another_preprocessing_has_the_fingerprint_of_its_own_export(exported):
    plain = str(exported / "apply")
    encoder = open_encoder(plain, EncoderOptions(exif="ignore"))
    assert encoder.preprocess.exif == "ignore"
    assert encoder.fingerprint == open_artifact(exported / "ignore").fingerprint
    fast = open_encoder(plain, EncoderOptions(decode="fast"))
    assert len({each.fingerprint for each in (fast, encoder, open_encoder(plain))}) == 3
    hog, applied, ignored = (
        open_encoder("hog", EncoderOptions(**options)).fingerprint
        for options in ({}, {"exif": "apply"}, {"exif": "ignore"})
    )
    assert applied == hog != ignored


def test_embed_gives_what_ten_lines_of_transformers_give(exported, tmp_path):
    """Photographs of many sizes, RGB and gray, orientation tags ignored on both sides."""
    from PIL import Image
    from sklearn.datasets import load_sample_images
    from transformers import CLIPImageProcessor, CLIPVisionModel

    from mlcd.artifacts.embeddings import EmbeddingsArtifact
    from mlcd.images.sources import open_source
    from mlcd.pipelines.embed import embed

    photos = tmp_path / "photos"
    photos.mkdir()
    pictures = [Image.fromarray(picture) for picture in load_sample_images().images]
    tags = Image.Exif()
    tags[274] = 6
    for number, (width, height) in enumerate(
        [(640, 427), (301, 427), (47, 90), (33, 32), (600, 80)]
    ):
        picture = pictures[number % 2].crop((0, 0, width, height))
        picture.save(photos / f"{number}.jpg", exif=tags)
        picture.convert("L").save(photos / f"{number}-gray.png")
    encoder = open_encoder(str(exported / "ignore"))
    embed(open_source(str(photos)), encoder, tmp_path / "embeddings", SILENT)
    ours = EmbeddingsArtifact.open(tmp_path / "embeddings")

    model, processor = (
        CLIPVisionModel.from_pretrained(exported / "weights").eval(),
        CLIPImageProcessor.from_pretrained(exported / "weights"),
    )
    for key, row in zip(ours.keys, ours.load(), strict=True):
        with torch.inference_mode():
            pooled = model(
                **processor(Image.open(photos / key), return_tensors="pt")
            ).pooler_output[0]
        assert (
            torch.nn.functional.cosine_similarity(pooled, torch.from_numpy(row), dim=0) > 0.9999
        ), key
    assert len(ours.keys) == 10


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("work", "work/model"),
        ("work/model/centers", "work/model"),
        ("work/run/checkpoints", "work/run"),
        ("work/run/checkpoints/step_000001/weights", "work/run/checkpoints/step_000001"),
    ],
)
def test_a_model_one_level_away_is_named(tmp_path, monkeypatch, cache, weights, given, meant):
    monkeypatch.chdir(tmp_path)
    made = {
        "model": "model",
        "model/centers": "centers",
        "run": "run",
        "run/checkpoints/step_000001": "checkpoint",
    }
    for name, kind in made.items():
        with Draft(Path("work", name), Request(kind)) as draft:
            draft.publish()
    weights.rename(Path("work/run/checkpoints/step_000001/weights"))
    with pytest.raises(ArtifactInvalid, match=rf"did you mean {meant}\?$"):
        resolve_model(given)


def test_the_artifact_of_the_right_kind_one_level_away_is_named(tmp_path):
    for name, kind in (("model", "model"), ("model/centers", "centers")):
        with Draft(tmp_path / name, Request(kind)) as draft:
            draft.publish()
    for given in ("model", "model/centers/deeper"):
        with pytest.raises(ArtifactInvalid, match=r"did you mean .*/model/centers\?$"):
            open_artifact(tmp_path / given, "centers")


def test_the_working_directory_is_no_model_and_no_traceback(tmp_path, monkeypatch, cache):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactInvalid, match="must hold weights"):
        resolve_model(".")
