"""Our towers against transformers' own classes with the same weights, in both directions, and every
layout.
"""

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    MLCDVisionConfig,
    MLCDVisionModel,
)

from mlcd.errors import ArtifactInvalid, ConfigInvalid, NotFound, Unavailable
from mlcd.images.transform import PreprocessSpec
from mlcd.models import zoo
from mlcd.models.checkpoints import read_state, write_state
from mlcd.models.configs import write_hf_config, write_hf_preprocessing
from mlcd.models.servable import Servable, tower_of
from mlcd.models.vit import ViT, ViTConfig
from mlcd.models.weight_files import digest_of_weights
from mlcd.models.zoo import PUBLISHED, LoadOptions

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SIZES = [
    # image, patch, width, depth, heads, mlp, projection
    (16, 8, 32, 2, 2, 64, 16),
    (32, 8, 48, 3, 4, 96, None),
    (28, 14, 64, 1, 4, 100, 24),
    (24, 4, 32, 2, 1, 32, None),
]


def tower(size, *, seed=0, **changes):
    image, patch, width, depth, heads, mlp, projection = size
    trunk = ViT(ViTConfig(image, patch, width, depth, heads, mlp, projection, **changes))
    generator = torch.Generator().manual_seed(seed)
    trunk.initialize(generator)
    with torch.no_grad():  # norms and biases away from 1 and 0, so that none may be left out
        for parameter in trunk.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return trunk.eval()


def hf_fields(config):
    return {
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "hidden_act": config.activation,
    }


def hf_class(config):
    if config.positions == "rope":
        return MLCDVisionModel, MLCDVisionConfig(**hf_fields(config))
    if config.embedding_dim is None:
        return CLIPVisionModel, CLIPVisionConfig(**hf_fields(config))
    return CLIPVisionModelWithProjection, CLIPVisionConfig(
        **hf_fields(config), projection_dim=config.embedding_dim
    )


def write_hf(trunk, folder, prefix="vision_model."):
    config = trunk.config
    (folder / "config.json").write_text(json.dumps(write_hf_config(config)))
    spec = PreprocessSpec(config.image_size, config.image_size)
    (folder / "preprocessor_config.json").write_text(json.dumps(write_hf_preprocessing(spec)))
    state = write_state(trunk.state_dict(), "hf")
    state = {
        name.replace("vision_model.", prefix): tensor.contiguous().clone()
        for name, tensor in state.items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def pixels(side, *, num=2, width=None):
    return torch.randn((num, 3, side, width or side), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("activation", "positions"), [("quick_gelu", "learned"), ("gelu", "rope")])
@torch.no_grad()
def test_transformers_loads_our_weights_and_gives_the_same_outputs(
    tmp_path, size, activation, positions
):
    if positions == "rope":
        size = (*size[:6], None)
    trunk = tower(size, activation=activation, positions=positions)
    write_hf(trunk, tmp_path)
    kind, _ = hf_class(trunk.config)
    theirs = kind.from_pretrained(tmp_path, attn_implementation="eager").eval()
    x = pixels(size[0])
    expected = theirs(x, output_hidden_states=True)
    pooled = getattr(expected, "image_embeds", None)
    assert torch.allclose(
        trunk(x), pooled if pooled is not None else expected.pooler_output, atol=1e-5
    )
    assert torch.allclose(trunk(x, "patches"), expected.last_hidden_state[:, 1:], atol=1e-5)
    assert torch.allclose(
        trunk(x, "penultimate_patches"), expected.hidden_states[-2][:, 1:], atol=1e-5
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("activation", "positions"), [("quick_gelu", "learned"), ("gelu", "rope")])
@torch.no_grad()
def test_we_load_what_transformers_saves_and_give_the_same_outputs(
    tmp_path, size, activation, positions
):
    if positions == "rope":
        size = (*size[:6], None)
    config = tower(size, activation=activation, positions=positions).config
    kind, hf_config = hf_class(config)
    torch.manual_seed(1)
    theirs = kind(hf_config).eval()
    theirs.save_pretrained(tmp_path)
    CLIPImageProcessor(size={"shortest_edge": size[0]}, crop_size=size[0]).save_pretrained(tmp_path)
    ours = zoo.load(str(tmp_path))
    assert ours.trunk.config == config
    x = pixels(size[0])
    expected = theirs(x)
    pooled = getattr(expected, "image_embeds", None)
    assert torch.allclose(
        ours.trunk(x), pooled if pooled is not None else expected.pooler_output, atol=1e-5
    )


@torch.no_grad()
def test_a_whole_clip_model_gives_its_image_tower(tmp_path):
    vision = hf_fields(tower(SIZES[0]).config) | {"hidden_act": "gelu"}
    text = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    ids = {"vocab_size": 20, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = CLIPModel(
        CLIPConfig(text_config=text | ids, vision_config=vision, projection_dim=12)
    ).eval()
    model.save_pretrained(tmp_path)
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16).save_pretrained(tmp_path)
    ours = zoo.load(str(tmp_path))
    assert ours.trunk.config.embedding_dim == 12
    assert ours.trunk.config.activation == "gelu"
    x = pixels(16)
    expected = model.visual_projection(model.vision_model(x).pooler_output)
    assert torch.allclose(ours.trunk(x), expected, atol=1e-5)
    assert torch.allclose(
        zoo.load(str(tmp_path), LoadOptions(projection=False)).trunk(x), ours.trunk(x, "pooled")
    )


@torch.no_grad()
def test_rope_follows_a_grid_that_is_not_square(tmp_path):
    trunk = tower((16, 4, 32, 2, 2, 64, None), positions="rope")
    write_hf(trunk, tmp_path)
    theirs = MLCDVisionModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    wide, tall = pixels(8, width=24), pixels(24, width=8)
    for x in (wide, tall):
        assert torch.allclose(trunk(x), theirs(x).pooler_output, atol=1e-5)
    assert not torch.allclose(trunk(wide), trunk(wide.transpose(2, 3)), atol=1e-3)


@torch.no_grad()
def test_learned_positions_are_resized_as_transformers_does(tmp_path):
    trunk = tower(SIZES[0])
    write_hf(trunk, tmp_path)
    theirs = CLIPVisionModelWithProjection.from_pretrained(tmp_path).eval()
    for x in (pixels(32), pixels(24, width=40)):
        expected = theirs(x, interpolate_pos_encoding=True).image_embeds
        assert torch.allclose(trunk(x), expected, atol=1e-5)
    larger = zoo.load(str(tmp_path), LoadOptions(image_size=32))
    assert larger.preprocess.crop == larger.trunk.config.image_size == 32
    assert torch.allclose(larger.trunk(pixels(32)), trunk(pixels(32)), atol=1e-6)


def test_the_tables_stay_in_float32_in_a_bf16_model():
    trunk = tower((16, 4, 32, 1, 2, 64, None), positions="rope")
    exact = trunk.rope((32, 32))
    half = trunk.to(torch.bfloat16)
    assert half.blocks[0].attn.qkv.weight.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(half.rope((32, 32)), exact, strict=True))
    assert half(pixels(16).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("layout", ["hf", "open_clip", "native", "ours"])
@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_every_layout_round_trips(layout, wrapper):
    trunk = (
        tower((16, 4, 32, 2, 2, 64, None), positions="rope")
        if layout == "native"
        else tower(SIZES[0])
    )
    theirs = {
        wrapper + name: tensor for name, tensor in write_state(trunk.state_dict(), layout).items()
    }
    found, ours = read_state(theirs, "a file")
    assert found == layout
    assert ours.keys() == trunk.state_dict().keys()
    for name, tensor in trunk.state_dict().items():
        assert torch.equal(ours[name], tensor), name


def test_open_clip_s_names_are_those_of_its_own_tower():
    """A tower built from torch's modules as open_clip builds it, named by hand from its source."""
    trunk = tower(SIZES[0])
    theirs = write_state(trunk.state_dict(), "open_clip")
    attention = torch.nn.MultiheadAttention(32, 2)
    expected = {
        f"transformer.resblocks.1.attn.{name}": p.shape for name, p in attention.named_parameters()
    }
    expected |= {
        "conv1.weight": (32, 3, 8, 8),
        "class_embedding": (32,),
        "positional_embedding": (5, 32),
    }
    expected |= {"ln_pre.weight": (32,), "ln_post.bias": (32,), "proj": (32, 16)}
    expected |= {
        "transformer.resblocks.0.ln_1.weight": (32,),
        "transformer.resblocks.0.mlp.c_proj.weight": (32, 64),
    }
    for name, shape in expected.items():
        assert tuple(theirs[name].shape) == tuple(shape), name


def open_clip_folder(trunk, folder, **model):
    config = trunk.config
    vision = {
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "width": config.width,
        "layers": config.depth,
        "head_width": config.head_dim,
        "mlp_ratio": config.mlp_width / config.width,
    }
    model = {"embed_dim": config.embedding_dim, "vision_cfg": vision, "text_cfg": {}, **model}
    preprocess = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25], "interpolation": "bicubic"}
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": model, "preprocess_cfg": preprocess})
    )
    state = {
        f"visual.{name}": tensor
        for name, tensor in write_state(trunk.state_dict(), "open_clip").items()
    }
    text = {"positional_embedding": torch.zeros(7, 8), "token_embedding.weight": torch.zeros(9, 8)}
    save_file(state | text, folder / "open_clip_model.safetensors")


@torch.no_grad()
def test_a_directory_of_open_clip_is_read_with_its_own_statistics(tmp_path):
    trunk = tower(SIZES[0], activation="quick_gelu")
    open_clip_folder(trunk, tmp_path, quick_gelu=True)
    ours = zoo.load(str(tmp_path))
    assert ours.trunk.config == trunk.config
    assert ours.preprocess == PreprocessSpec(16, 16, mean=(0.5,) * 3, std=(0.25,) * 3)
    assert torch.equal(ours.trunk(pixels(16)), trunk(pixels(16)))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".bin"])
def test_bare_weights_take_the_rest_from_a_named_tower_and_are_never_guessed(
    tmp_path, suffix, monkeypatch
):
    trunk = tower(SIZES[0], activation="quick_gelu")
    monkeypatch.setattr(zoo, "PUBLISHED", {"small": zoo.Published(trunk.config, None)})
    state = {
        f"visual.{name}": tensor
        for name, tensor in write_state(trunk.state_dict(), "open_clip").items()
    }
    file = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file(state, file)
    else:
        torch.save(
            {
                "epoch": 3,
                "state_dict": {f"module.{name}": tensor.half() for name, tensor in state.items()},
            },
            file,
        )
    with pytest.raises(ConfigInvalid, match="--like NAME") as error:
        zoo.load(str(file))
    assert "small" in str(error.value)
    loaded = zoo.load(str(file), LoadOptions(like="small"))
    assert loaded.trunk.config == trunk.config
    assert loaded.trunk.pos.dtype == torch.float32
    with pytest.raises(ConfigInvalid, match="a published tower is one of"):
        zoo.load(str(file), LoadOptions(like="large"))


def write_shards(folder, suffix=".safetensors"):
    """Writes a tower in two shards with their index, and returns the tower's fingerprint."""
    trunk = tower(SIZES[1])
    write_hf(trunk, folder)
    fingerprint = zoo.load(str(folder)).fingerprint()
    state = write_state(trunk.state_dict(), "hf")
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    for part, chosen in enumerate((names[:9], names[9:])):
        tensors = {name: state[name].contiguous() for name in chosen}
        save = save_file if suffix == ".safetensors" else torch.save
        save(tensors, folder / f"part-{part}{suffix}")
    index = {name: f"part-{int(name in names[9:])}{suffix}" for name in names}
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    write_index(folder / f"{stem}{suffix}.index.json", index)
    return fingerprint


def write_index(path, index):
    path.write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_sharded_weights_are_read_by_their_index(tmp_path, suffix):
    fingerprint = write_shards(tmp_path, suffix)
    assert zoo.load(str(tmp_path)).fingerprint() == fingerprint
    (index,) = tmp_path.glob("*.index.json")
    before = digest_of_weights(str(index))
    shard = tmp_path / f"part-1{suffix}"
    shard.write_bytes(shard.read_bytes() + b"0")
    assert digest_of_weights(str(index)) != before


def remove(shard):
    shard.unlink()


def put_a_folder(shard):
    shard.unlink()
    shard.mkdir()


def put_a_pointer(shard):
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")


def cut_short(shard):
    shard.write_bytes(shard.read_bytes()[:-9])


def empty(shard):
    shard.write_bytes(b"")


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove, "index.json names, is missing"),
        (put_a_folder, "is unusable: is a directory"),
        (put_a_pointer, "is a Git LFS pointer.*git lfs pull"),
        (cut_short, "cannot be read as"),
        (empty, "cannot be read as"),
    ],
)
def test_a_shard_that_cannot_be_read_is_named(tmp_path, suffix, damage, message):
    write_shards(tmp_path, suffix)
    damage(tmp_path / f"part-1{suffix}")
    with pytest.raises(ArtifactInvalid, match=f"part-1{suffix}.*{message}"):
        zoo.load(str(tmp_path))
    if damage not in (cut_short, empty):  # which a digest tells from the whole file
        with pytest.raises(ArtifactInvalid, match=f"part-1{suffix}.*{message}"):
            digest_of_weights(str(tmp_path))


def test_a_tensor_that_is_not_in_its_shard_is_named(tmp_path):
    write_shards(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())["weight_map"]
    write_index(path, {**index, "extra": "part-0.safetensors"})
    with pytest.raises(ArtifactInvalid, match=r"part-0\.safetensors lacks the tensor extra, which"):
        zoo.load(str(tmp_path))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "\xff",
     '{"weight_map": {"a": ".."}}', '{"weight_map": {"a": "../x.bin"}}', '{"weight_map": [1]}',
     '{"weight_map": {"a": "a\\\\b"}}', "[" * 100_000,
     "version https://git-lfs.github.com/spec/v1"],
)  # fmt: skip
def test_a_damaged_index_is_named(tmp_path, text):
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    for read in (digest_of_weights, zoo.load):
        with pytest.raises(ArtifactInvalid, match=r"model\.safetensors\.index\.json "):
            read(str(tmp_path))


def test_a_single_file_that_is_a_pointer_is_named(tmp_path):
    write_hf(tower(SIZES[1]), tmp_path)
    put_a_pointer(tmp_path / "model.safetensors")
    for spec in (tmp_path, tmp_path / "model.safetensors"):
        for read in (digest_of_weights, zoo.load):
            with pytest.raises(ArtifactInvalid, match="is a Git LFS pointer"):
                read(str(spec))


@pytest.mark.parametrize(
    ("name", "parameters", "activation"),
    [
        ("mlcd-vit-base-patch32-224", 87_456_000, "quick_gelu"),
        ("mlcd-vit-large-patch14-336", 303_507_456, "quick_gelu"),
        ("mlcd-vit-bigG-patch14-224", 1_842_349_748, "gelu"),
        ("mlcd-vit-bigG-patch14-336", 1_842_349_748, "gelu"),
        ("mlcd-vit-bigG-patch14-448", 1_842_349_748, "gelu"),
        ("rice-vit-large-patch14-560", pytest.approx(302.9e6, abs=0.05e6), "gelu"),
        ("openai-vit-base-patch32", 87_849_216, "quick_gelu"),
        ("openai-vit-base-patch16", 86_192_640, "quick_gelu"),
        ("openai-vit-large-patch14", 303_966_208, "quick_gelu"),
        ("openai-vit-large-patch14-336", 304_293_888, "quick_gelu"),
    ],
)
def test_published_towers_have_their_parameter_counts_and_activations(name, parameters, activation):
    with torch.device("meta"):
        trunk = ViT(PUBLISHED[name].config)
    assert sum(parameter.numel() for parameter in trunk.parameters()) == parameters
    assert trunk.config.activation == activation


def break_missing(folder):
    state = write_state(tower(SIZES[0]).state_dict(), "hf")
    del state["vision_model.encoder.layers.1.mlp.fc2.bias"]
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors"
    )


def break_half_of_qkv(folder):
    state = write_state(tower(SIZES[0]).state_dict(), "hf")
    del state["vision_model.encoder.layers.1.self_attn.v_proj.bias"]
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors"
    )


def break_unknown(folder):
    state = write_state(tower(SIZES[0]).state_dict(), "hf") | {
        "vision_model.extra.weight": torch.zeros(3)
    }
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors"
    )


def break_shape(folder):
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 65}
    (folder / "config.json").write_text(json.dumps(config))


def break_nan(folder):
    trunk = tower(SIZES[0])
    with torch.no_grad():
        trunk.cls[0] = math.nan
    write_hf(trunk, folder)


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def edit_config(**changes):
    def edit(folder):
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def edit_preprocessing(**changes):
    def edit(folder):
        file = folder / "preprocessor_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (break_missing, ArtifactInvalid, "encoder.layers.1.mlp.fc2.bias is missing"),
        (break_half_of_qkv, ArtifactInvalid, "layers.1.self_attn.v_proj.bias is missing"),
        (break_unknown, ArtifactInvalid, "extra.weight .* does not belong to a"),
        (break_shape, ArtifactInvalid, r"encoder.layers.0.mlp.fc1.bias .* \[65\], got \[64\]"),
        (break_nan, ArtifactInvalid, "class_embedding .* must be finite"),
        (cut, ArtifactInvalid, "model.safetensors cannot be read"),
        (edit_config(hidden_act="relu"), ConfigInvalid, "hidden_act .* got 'relu'"),
        (edit_config(model_type="blip"), ConfigInvalid, "model_type .* got 'blip'"),
        (edit_config(model_type="siglip"), ConfigInvalid, "model_type .* got 'siglip'"),
        (edit_config(hidden_size="wide"), ConfigInvalid, "hidden_size .* got 'wide'"),
        (edit_config(num_channels=1), ConfigInvalid, "num_channels must be 3, got 1"),
        (edit_config(image_size=[16, 24]), ConfigInvalid, "image_size must be a square"),
        (edit_preprocessing(resample=2), ConfigInvalid, "resample must be 3, got 2"),
        (edit_preprocessing(image_mean=[0.5]), ConfigInvalid, "image_mean"),
        (edit_preprocessing(do_center_crop=False), ConfigInvalid, "do_center_crop"),
        (edit_preprocessing(crop_size=8, size=8), ConfigInvalid, "--image-size"),
        (
            lambda folder: (folder / "preprocessor_config.json").unlink(),
            ConfigInvalid,
            "--preprocess clip",
        ),
        (
            lambda folder: (folder / "config.json").write_text("{"),
            ArtifactInvalid,
            "cannot be read as JSON",
        ),
        (lambda folder: (folder / "config.json").unlink(), ConfigInvalid, "--like NAME"),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            ArtifactInvalid,
            "must hold weights",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_that_names_it(tmp_path, damage, error, message):
    write_hf(tower(SIZES[0]), tmp_path)
    damage(tmp_path)
    with pytest.raises(error, match=message) as raised:
        zoo.load(str(tmp_path))
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


class _Harmful:
    def __reduce__(self):
        return print, ("this must not run",)


def test_a_pickle_of_other_things_never_runs(tmp_path, capsys):
    torch.save({"weights": _Harmful()}, tmp_path / "evil.pt")
    with pytest.raises(ArtifactInvalid, match="more than tensors"):
        zoo.load(str(tmp_path / "evil.pt"))
    torch.save({"lr": 0.1}, tmp_path / "settings.pt")
    with pytest.raises(ArtifactInvalid, match="must hold a state dict"):
        zoo.load(str(tmp_path / "settings.pt"))
    (tmp_path / "noise.pt").write_bytes(b"not a pickle at all")
    with pytest.raises(ArtifactInvalid, match="cannot be read as weights"):
        zoo.load(str(tmp_path / "noise.pt"))
    assert capsys.readouterr().out == ""


@pytest.mark.filterwarnings("ignore")
def test_a_torchscript_archive_is_refused_as_the_program_that_it_is(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "ViT-B-32.pt")
    with pytest.raises(ArtifactInvalid, match="TorchScript"):
        zoo.load(str(tmp_path / "ViT-B-32.pt"))


def test_other_architectures_are_named(tmp_path):
    save_file({"patch_embed.proj.weight": torch.zeros(3)}, tmp_path / "unicom.safetensors")
    with pytest.raises(ArtifactInvalid, match="UNICOM"):
        zoo.load(str(tmp_path / "unicom.safetensors"))
    save_file({"layer1.weight": torch.zeros(3)}, tmp_path / "resnet.safetensors")
    with pytest.raises(ArtifactInvalid, match="must hold a vision tower"):
        zoo.load(str(tmp_path / "resnet.safetensors"))


def test_the_hub_is_asked_only_when_it_is_named(monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("no network")

    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(NotFound, match="write hub:DeepGlint-AI/mlcd-vit-base-patch32-224"):
        zoo.load("DeepGlint-AI/mlcd-vit-base-patch32-224")
    with pytest.raises(Unavailable, match="cannot be fetched from the hub"):
        zoo.load("hub:DeepGlint-AI/mlcd-vit-base-patch32-224")
    with pytest.raises(ConfigInvalid, match="a hub model must be"):
        zoo.load("hub:../etc/passwd")


def test_activation_and_heads_are_part_of_the_fingerprint():
    trunk = tower(SIZES[0])
    prints = set()
    for change in ({}, {"activation": "quick_gelu"}, {"heads": 4}, {"norm_eps": 1e-6}):
        config = dataclasses.replace(trunk.config, **change)
        prints.add(
            Servable(
                tower_of(config, trunk.state_dict(), "x"), PreprocessSpec(16, 16)
            ).fingerprint()
        )
    assert len(prints) == 4
