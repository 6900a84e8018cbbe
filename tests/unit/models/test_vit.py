from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from mlcd.errors import ArtifactInvalid, ConfigInvalid
from mlcd.images.transform import CLIP_MEAN, CLIP_STD, PreprocessSpec
from mlcd.models.configs import write_hf_config
from mlcd.models.servable import Servable
from mlcd.models.vit import ViT, ViTConfig

SMALL = ViTConfig(
    image_size=16, patch_size=8, width=32, depth=2, heads=2, mlp_width=64, embedding_dim=16
)


def small_model(config=SMALL, seed=0):
    trunk = ViT(config)
    trunk.initialize(torch.Generator().manual_seed(seed))
    return Servable(trunk, PreprocessSpec(config.image_size, config.image_size)).eval()


@pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
def test_a_block_equals_torch_s_own_transformer_layer(activation):
    """nn.TransformerEncoderLayer, pre-norm, with the same weights: an implementation that is not
    ours.
    """
    config = ViTConfig(16, 8, 32, 1, 4, 64, activation=activation)
    ours = ViT(config)
    ours.initialize(torch.Generator().manual_seed(0))
    block = ours.blocks[0]
    gelu = nn.functional.gelu if activation == "gelu" else lambda x: x * torch.sigmoid(1.702 * x)
    theirs = nn.TransformerEncoderLayer(
        32, 4, 64, 0.0, gelu, batch_first=True, norm_first=True
    ).eval()
    names = {
        "self_attn.in_proj_weight": "attn.qkv.weight",
        "self_attn.in_proj_bias": "attn.qkv.bias",
        "self_attn.out_proj.weight": "attn.out.weight",
        "self_attn.out_proj.bias": "attn.out.bias",
        "linear1.weight": "mlp.fc1.weight",
        "linear1.bias": "mlp.fc1.bias",
        "linear2.weight": "mlp.fc2.weight",
        "linear2.bias": "mlp.fc2.bias",
        "norm1.weight": "norm1.weight",
        "norm1.bias": "norm1.bias",
        "norm2.weight": "norm2.weight",
        "norm2.bias": "norm2.bias",
    }
    state = block.state_dict()
    theirs.load_state_dict({name: state[ours_name] for name, ours_name in names.items()})
    x = torch.randn((3, 5, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(block(x), theirs(x), atol=1e-5)


def test_the_servable_normalizes_inside_and_gives_unit_rows():
    model = small_model()
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 16, 16), dtype=np.uint8)
    by_hand = (pixels / 255 - np.reshape(CLIP_MEAN, (3, 1, 1))) / np.reshape(CLIP_STD, (3, 1, 1))
    with torch.no_grad():
        rows = model(torch.from_numpy(pixels))
        expected = model.trunk(torch.from_numpy(by_hand).float())
    assert rows.norm(dim=1).tolist() == pytest.approx([1, 1, 1], abs=1e-6)
    assert torch.allclose(rows, nn.functional.normalize(expected, dim=1), atol=1e-5)


def test_weights_round_trip_and_the_fingerprint_is_theirs(tmp_path):
    model = small_model()
    model.write(tmp_path)
    assert Servable.read(tmp_path).fingerprint() == model.fingerprint()
    assert small_model(seed=1).fingerprint() != model.fingerprint()
    other = Servable(model.trunk, PreprocessSpec(20, 16))
    assert other.fingerprint() != model.fingerprint()


def test_damaged_or_foreign_weights_are_refused_naming_the_tensor(tmp_path):
    small_model().write(tmp_path)
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace('"depth": 2', '"depth": 3')
    )
    with pytest.raises(ArtifactInvalid, match=r"blocks\.2\.attn\.out\.bias is missing"):
        Servable.read(tmp_path)
    small_model().write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(ArtifactInvalid, match=r"the weights in .* cannot be read"):
        Servable.read(tmp_path)


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_registers_are_tokens_without_a_place_and_without_an_output(positions):
    """They stand behind the class token; no position is added to them, and nothing turns them."""
    config = replace(SMALL, positions=positions, registers=3)
    assert config.num_tokens == 1 + 3 + 4
    tower = small_model(config).trunk
    pixels = torch.randn((2, 3, 16, 16), generator=torch.Generator().manual_seed(1))
    patches = tower.patch(pixels).flatten(2).transpose(1, 2)
    class_token, registers = (each.expand(2, -1, -1) for each in (tower.cls[None], tower.registers))
    rotation = None
    if positions == "learned":
        class_token, patches = class_token + tower.pos[:1], patches + tower.pos[1:]
    else:
        plain = small_model(replace(SMALL, positions="rope")).trunk.rope
        plain.load_state_dict(tower.rope.state_dict())
        still = (torch.ones(3, 8), torch.zeros(3, 8))
        rotation = tuple(
            torch.cat([angles[:1], none, angles[1:]])
            for angles, none in zip(plain((2, 2)), still, strict=True)
        )
    x = tower.norm_pre(torch.cat([class_token, registers, patches], dim=1))
    for block in tower.blocks:
        x = block(x, rotation)
    assert torch.allclose(tower(pixels), tower.proj(tower.norm_post(x[:, 0])), atol=1e-6)
    assert torch.allclose(tower(pixels, "patches"), x[:, 4:], atol=1e-6)
    tower(pixels).sum().backward()
    assert tower.registers.grad.abs().min() > 0


def test_a_tower_with_registers_is_not_written_for_transformers():
    with pytest.raises(ConfigInvalid, match="registers"):
        write_hf_config(replace(SMALL, registers=1))


@pytest.mark.parametrize(
    "change",
    [
        {"patch_size": 7},
        {"heads": 5},
        {"activation": "relu"},
        {"registers": -1},
    ],
)
def test_an_impossible_config_cannot_be_built(change):
    with pytest.raises(ConfigInvalid):
        ViTConfig.from_dict(SMALL.to_dict() | change)


def test_a_config_of_an_earlier_version_is_read():
    fields = SMALL.to_dict()
    assert ViTConfig.from_dict(fields | {"pooling": "class_token"}) == SMALL
    with pytest.raises(ConfigInvalid, match="fields of a ViT"):
        ViTConfig.from_dict(fields | {"pooling": "attention"})
