"""Two-tower models against transformers' own classes with the same weights, in both directions, and
against open_clip's text tower.
"""

import importlib
import importlib.metadata
import json
import sys
import types
import warnings

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPConfig, CLIPModel

from mlcd.errors import ArtifactInvalid, ConfigInvalid
from mlcd.images.transform import PreprocessSpec
from mlcd.models import zoo
from mlcd.models.checkpoints import write_state
from mlcd.models.configs import clip_preprocessing, write_hf_preprocessing
from mlcd.models.text import TextConfig, TextTower
from mlcd.models.tokenizer import Tokenizer
from mlcd.models.two_tower_checkpoints import read_two_tower_state, write_two_tower_state
from mlcd.models.two_tower_files import TwoTowerModel, read_two_towers, write_two_towers
from mlcd.models.two_towers import TwoTowers
from mlcd.models.vit import ViT, ViTConfig

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

VOCABULARY = 50
EOS = 37
VISION = [
    # image, patch, width, depth, heads, mlp
    (16, 8, 32, 2, 2, 64),
    (28, 7, 48, 3, 4, 100),
    (24, 4, 32, 1, 1, 32),
]
TEXT = [
    # context, width, depth, heads, mlp
    (9, 32, 2, 2, 64),
    (5, 24, 1, 4, 50),
    (12, 64, 3, 1, 32),
]
ACTIVATIONS = ["quick_gelu", "gelu", "gelu_pytorch_tanh"]


def hf_config(vision, text, activation, *, dimension=20, eos=EOS, eps=1e-5):
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    image, patch, *sizes = vision
    context, *text_sizes = text
    shared = {"hidden_act": activation, "layer_norm_eps": eps}
    vision_fields = dict(zip(names, sizes, strict=True)) | shared | {"patch_size": patch}
    text_fields = dict(zip(names, text_sizes, strict=True)) | shared
    text_fields |= {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": context,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": eos,
    }
    vision_fields["image_size"] = image
    return CLIPConfig(
        vision_config=vision_fields, text_config=text_fields, projection_dim=dimension
    )


def stir(model, seed=0):
    """Moves every weight away from what it begins with, so that none may be left out."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def drawn(tower):
    """Gives one of our towers, which are built without weights, random ones."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    return tower.eval()


def write_companions(folder, side):
    """Writes the preprocessing and a tokenizer beside weights."""
    spec = clip_preprocessing(side)
    (folder / "preprocessor_config.json").write_text(json.dumps(write_hf_preprocessing(spec)))
    words = {"<pad>": 0, "a": 1, "cat": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>"}))


def pixels(side, *, num=3):
    return torch.randn((num, 3, side, side), generator=torch.Generator().manual_seed(5))


def ids(context, *, num=4, high=VOCABULARY):
    """Token ids whose rows hold EOS at different places, once, twice, or at the very end."""
    rows = torch.randint(0, high, (num, context), generator=torch.Generator().manual_seed(6))
    rows[rows == EOS] = 3
    rows[0, 2] = rows[0, 4] = rows[1, -1] = rows[2, 1] = rows[3, 0] = EOS
    return rows


def their_features(theirs, x, tokens):
    """The outputs of transformers' towers before they are normalized."""
    image = theirs.get_image_features(pixel_values=x)
    return image.pooler_output, theirs.get_text_features(input_ids=tokens).pooler_output


def assert_same_towers(ours, theirs, x, tokens):
    image, text = their_features(theirs, x, tokens)
    assert torch.allclose(ours.vision(x), image, atol=1e-5)
    assert torch.allclose(ours.text(tokens), text, atol=1e-5)
    cosines = nn.functional.normalize(image, dim=1) @ nn.functional.normalize(text, dim=1).T
    assert torch.allclose(ours(x, tokens), theirs.logit_scale.exp() * cosines, atol=1e-4)


# Every pair of two of the three choices, once.
PAIRS = [
    (activation, vision, TEXT[(a + b) % 3])
    for a, vision in enumerate(VISION)
    for b, activation in enumerate(ACTIVATIONS)
]


@pytest.mark.parametrize(("activation", "vision", "text"), PAIRS)
@torch.no_grad()
def test_both_towers_equal_transformers_both_ways(tmp_path, activation, vision, text):
    torch.manual_seed(1)
    theirs = stir(CLIPModel(hf_config(vision, text, activation)))
    there, back = tmp_path / "theirs", tmp_path / "ours"
    theirs.save_pretrained(there)
    write_companions(there, vision[0])
    ours = read_two_towers(str(there))
    x, tokens = pixels(vision[0]), ids(text[0])
    assert_same_towers(ours.towers, theirs, x, tokens)

    back.mkdir()
    write_two_towers(ours, back)
    again = CLIPModel.from_pretrained(back).eval()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert_same_towers(ours.towers, again, x, tokens)
    assert read_two_towers(str(back)).towers.text.config == ours.towers.text.config


@torch.no_grad()
def test_clip_pools_at_the_highest_id_where_its_config_has_the_wrong_end_token(tmp_path):
    theirs = stir(CLIPModel(hf_config(VISION[0], TEXT[0], "quick_gelu", eos=2)))
    theirs.save_pretrained(tmp_path)
    write_companions(tmp_path, 16)
    ours = read_two_towers(str(tmp_path)).towers
    assert ours.text.config.pooling == "highest_id"
    assert_same_towers(ours, theirs, pixels(16), ids(9))
    short = ids(9)[:, :5]  # rows may be shorter than the context
    assert torch.allclose(ours.text(short), their_features(theirs, pixels(16), short)[1], atol=1e-5)


@torch.no_grad()
def test_sections_of_old_configs_take_the_place_of_the_new(tmp_path):
    theirs = stir(CLIPModel(hf_config(VISION[0], TEXT[0], "gelu")))
    theirs.save_pretrained(tmp_path)
    write_companions(tmp_path, 16)
    config = json.loads((tmp_path / "config.json").read_text())
    old = {f"{name}_dict": config[name] for name in ("text_config", "vision_config")}
    wrong = {
        name: config[name] | {"hidden_act": "quick_gelu"}
        for name in ("text_config", "vision_config")
    }
    (tmp_path / "config.json").write_text(json.dumps(config | wrong | old))
    again = CLIPModel.from_pretrained(tmp_path).eval()
    ours = read_two_towers(str(tmp_path)).towers
    assert_same_towers(ours, again, pixels(16), ids(9))
    assert ours.text.config.activation == ours.vision.config.activation == "gelu"


@pytest.fixture(scope="module")
def open_clip_text_transformer():
    """open_clip's text tower, by file: the package itself asks for torchvision and timm."""
    folder = importlib.metadata.distribution("open_clip_torch").locate_file("open_clip")
    package = types.ModuleType("open_clip_by_file")
    package.__path__ = [str(folder)]
    utils = types.ModuleType("open_clip_by_file.utils")
    utils.to_2tuple = lambda x: (x, x)
    utils.feature_take_indices = None
    before = dict(sys.modules)
    sys.modules |= {"open_clip_by_file": package, "open_clip_by_file.utils": utils}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("open_clip_by_file.transformer")
    yield module
    for name in set(sys.modules) - set(before):
        if name.startswith("open_clip_by_file"):
            del sys.modules[name]


OPEN_CLIP = [
    # text_cfg, what it makes of our text config
    ({}, {"pooling": "highest_id"}),
    ({"pool_type": "eos", "eos_id": EOS}, {"pooling": "eos", "eos_token_id": EOS}),
    ({"pool_type": "last", "no_causal_mask": True, "proj_bias": True},
     {"pooling": "last", "causal": False, "projection_bias": True}),
    ({"act_kwargs": {"approximate": "tanh"}, "norm_kwargs": {"eps": 1e-6}},
     {"activation": "gelu_pytorch_tanh", "norm_eps": 1e-6, "pooling": "highest_id"}),
    ({"quick_gelu": True}, {"activation": "quick_gelu", "pooling": "highest_id"}),
]  # fmt: skip


@pytest.mark.parametrize(("text_cfg", "changes"), OPEN_CLIP)
@pytest.mark.parametrize("text", TEXT[:2])
@torch.no_grad()
def test_open_clip_s_text_tower_gives_the_same(
    tmp_path, open_clip_text_transformer, text_cfg, changes, text
):
    oc = open_clip_text_transformer
    context, width, depth, heads, mlp = text
    quick = text_cfg.get("quick_gelu", False)
    act = oc.QuickGELU if quick else nn.GELU
    if arguments := text_cfg.get("act_kwargs"):
        act = lambda: nn.GELU(**arguments)  # noqa: E731
    eps = text_cfg.get("norm_kwargs", {}).get("eps", 1e-5)
    plain = {
        name: text_cfg[name]
        for name in ("pool_type", "eos_id", "no_causal_mask", "proj_bias")
        if name in text_cfg
    }
    theirs = oc.TextTransformer(
        context_length=context, vocab_size=VOCABULARY, width=width, heads=heads, layers=depth,
        mlp_ratio=mlp / width, output_dim=16, act_layer=act,
        norm_layer=lambda size: oc.LayerNorm(size, eps=eps), **plain,
    )  # fmt: skip
    stir(theirs)
    visual = drawn(ViT(ViTConfig(16, 8, 32, 2, 2, 64, 16)))
    prefix = "text." if "proj_bias" in text_cfg else ""
    state = {
        f"visual.{name}": part
        for name, part in write_state(visual.state_dict(), "open_clip").items()
    }
    state |= {f"{prefix}{name}": part.contiguous() for name, part in theirs.state_dict().items()}
    state["logit_scale"] = torch.tensor(2.5)
    save_file(state, tmp_path / "open_clip_model.safetensors")
    config = {
        "embed_dim": 16, "quick_gelu": quick,
        "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16, "mlp_ratio": 2.0},
        "text_cfg": {"context_length": context, "vocab_size": VOCABULARY, "width": width, "heads": heads,
                     "layers": depth, "mlp_ratio": mlp / width}
        | {name: value for name, value in text_cfg.items() if name != "quick_gelu"},
    }  # fmt: skip
    preprocess = {"mean": [0.5] * 3, "std": [0.5] * 3}
    (tmp_path / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": config, "preprocess_cfg": preprocess})
    )
    write_companions(tmp_path, 16)
    ours = read_two_towers(str(tmp_path)).towers
    expected = {"activation": "gelu", "causal": True} | changes
    assert ours.text.config == TextConfig(
        VOCABULARY, context, width, depth, heads, mlp, 16, **expected
    )
    assert torch.allclose(ours.text(ids(context)), theirs(ids(context)), atol=1e-5)
    assert ours.logit_scale.item() == 2.5
    written = write_two_tower_state(ours, "open_clip")
    assert written.keys() == state.keys()
    assert all(torch.equal(written[name], part) for name, part in state.items())


def test_openai_s_files_hold_halves_and_numbers_that_are_no_weights():
    towers = small_clip()
    state = {name: part.half() for name, part in write_two_tower_state(towers, "open_clip").items()}
    numbers = {"input_resolution": 16, "context_length": 9, "vocab_size": VOCABULARY}
    state |= {name: torch.tensor(number) for name, number in numbers.items()}
    read = read_two_tower_state({f"module.{name}": part for name, part in state.items()}, "a file")
    for found, tower in ((read.vision, towers.vision), (read.text, towers.text)):
        expected = tower.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], part.half()) for name, part in expected.items())
    assert read.logit_scale.item() == 2.0
    assert read.logit_bias is None


def small_clip(**text):
    sizes = {"activation": "gelu", "causal": True, "pooling": "eos", "eos_token_id": EOS} | text
    return TwoTowers(
        drawn(ViT(ViTConfig(16, 8, 32, 2, 2, 64, 16))),
        drawn(TextTower(TextConfig(VOCABULARY, 9, 32, 1, 2, 64, 16, **sizes))),
        logit_scale=torch.tensor(2.0),
    )


def two_tower_folder(folder):
    theirs = stir(CLIPModel(hf_config(VISION[0], TEXT[0], "gelu")))
    theirs.save_pretrained(folder)
    write_companions(folder, 16)
    return theirs.state_dict()


def rewrite(folder, state):
    save_file(
        {name: part.contiguous() for name, part in state.items()}, folder / "model.safetensors"
    )


def without(name):
    def damage(folder, state):
        rewrite(folder, {key: part for key, part in state.items() if key != name})

    return damage


def with_tensor(name, *shape):
    def damage(folder, state):
        rewrite(folder, state | {name: torch.zeros(shape)})

    return damage


def with_config(section, **changes):
    def damage(folder, _):
        config = json.loads((folder / "config.json").read_text())
        (config[section] if section else config).update(changes)
        (folder / "config.json").write_text(json.dumps(config))

    return damage


def with_preprocessing(**changes):
    def damage(folder, _):
        file = folder / "preprocessor_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def no_file(name):
    return lambda folder, _: (folder / name).unlink()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (without("text_model.final_layer_norm.bias"), ArtifactInvalid, "tensor final_layer_norm.bias is missing"),
        (without("text_model.encoder.layers.1.self_attn.k_proj.weight"), ArtifactInvalid, "k_proj.weight is missing"),
        (without("vision_model.embeddings.class_embedding"), ArtifactInvalid, "class_embedding is missing"),
        (without("logit_scale"), ArtifactInvalid, "logit_scale is missing"),
        (without("text_projection.weight"), ArtifactInvalid, "must hold the two towers"),
        (with_tensor("text_model.extra", 3), ArtifactInvalid, "tensor extra .* does not belong to a text tower"),
        (with_config("text_config", hidden_act="relu"), ConfigInvalid, "hidden_act .* got 'relu'"),
        (with_config("text_config", vocab_size=51), ArtifactInvalid, "token_embedding.weight .* \\[51, 32\\], got \\[50, 32\\]"),
        (with_config("text_config", eos_token_id=[2, 3]), ConfigInvalid, "eos_token_id"),
        (with_config(None, model_type="blip"), ConfigInvalid, "model_type .* got 'blip'"),
        (no_file("config.json"), ConfigInvalid, "must have a config of its towers"),
        (no_file("preprocessor_config.json"), ConfigInvalid, "preprocessing is unknown"),
        (with_preprocessing(image_processor_type="SiglipImageProcessor"), ConfigInvalid, "--with transformers"),
        (no_file("tokenizer.json"), ArtifactInvalid, "lacks tokenizer.json"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_named(tmp_path, damage, error, message):
    damage(tmp_path, two_tower_folder(tmp_path))
    with pytest.raises(error, match=message):
        read_two_towers(str(tmp_path))


def test_timm_s_siglip_of_open_clip_is_refused_by_name(tmp_path):
    state = {"visual.trunk.patch_embed.proj.weight": torch.zeros(1), "logit_scale": torch.zeros(())}
    save_file(state, tmp_path / "weights.safetensors")
    with pytest.raises(ArtifactInvalid, match="timm"):
        zoo.load(str(tmp_path / "weights.safetensors"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            {"pooling": "last", "eos_token_id": None},
            "needs text pooling end of text, got last",
        ),
        ({"eos_token_id": 2}, "needs text pooling end of text, got at token 2"),
        ({"causal": False}, "needs text attention causal, got bidirectional"),
        ({"projection_bias": True}, "needs text projection without bias, got with bias"),
    ],
)
def test_a_class_that_cannot_hold_the_towers_is_not_written(tmp_path, text, message):
    two_tower_folder(tmp_path)
    tokenizer = Tokenizer.read(tmp_path, 9)
    model = TwoTowerModel(small_clip(**text), PreprocessSpec(16, 16), tokenizer)
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigInvalid, match=message):
        write_two_towers(model, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    "changes",
    [{"pooling": "mean"}, {"pooling": "last"}, {"eos_token_id": None}, {"activation": "relu"}],
)
def test_an_impossible_text_config_cannot_be_built(changes):
    with pytest.raises(ConfigInvalid):
        small_clip(**changes)


def test_rows_beyond_the_context_are_refused():
    with pytest.raises(ConfigInvalid, match="at most 9 tokens, got 10"):
        small_clip().text(torch.zeros((1, 10), dtype=torch.int64))


def test_towers_of_different_dimensions_are_no_pair():
    with pytest.raises(ConfigInvalid, match="got 16 for images and 8 for texts"):
        TwoTowers(
            ViT(ViTConfig(16, 8, 32, 2, 2, 64, 16)),
            TextTower(TextConfig(9, 9, 32, 1, 2, 64, 8, "gelu", causal=True, pooling="highest_id")),
            logit_scale=torch.tensor(0.0),
        )
