"""Tiny models of transformers with random weights, one of each architecture that runs here."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers as t

from tests.two_tower_models import write_tokenizer

SIDE, CONTEXT = 32, 12
_BLOCKS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
VISION = {**_BLOCKS, "image_size": SIDE, "patch_size": 8}
_TEXT = {
    **_BLOCKS,
    "vocab_size": 40,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 38,
    "eos_token_id": 39,
}
_NAFLEX = {**_BLOCKS, "patch_size": 8, "num_patches": 16}


@dataclass(frozen=True)
class Case:
    """An architecture. texts: the kind of tokenizer, None without a text tower."""

    title: str
    build: Callable[[], torch.nn.Module]
    texts: str | None = None
    processor: Callable[[], object] | None = None


def open_processor(case: Case) -> object:
    return (case.processor or clip_processor)()


def clip_processor() -> object:
    return t.CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    )


def square_processor() -> object:
    return t.SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}, resample=2)


def naflex_processor() -> object:
    return t.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16)


def convnext_processor() -> object:
    return t.ConvNextImageProcessorPil(size={"shortest_edge": SIDE}, crop_pct=0.8)


def efficientnet_processor() -> object:
    return t.EfficientNetImageProcessorPil(size={"height": SIDE, "width": SIDE}, resample=3)


CASES = {
    "clip": Case(
        "CLIP",
        lambda: t.CLIPModel(
            t.CLIPConfig(
                vision_config=VISION, text_config={**_TEXT, "pad_token_id": 39}, projection_dim=24
            )
        ),
        "clip",
    ),
    "siglip": Case(
        "SigLIP, SigLIP 2",
        lambda: t.SiglipModel(t.SiglipConfig(vision_config=VISION, text_config=_TEXT)),
        "siglip",
        square_processor,
    ),
    "siglip2": Case(
        "SigLIP 2 NaFlex, at a square size",
        lambda: t.Siglip2Model(t.Siglip2Config(vision_config=_NAFLEX, text_config=_TEXT)),
        "siglip",
        naflex_processor,
    ),
    "metaclip_2": Case(
        "MetaCLIP 2",
        lambda: t.MetaClip2Model(
            t.MetaClip2Config(
                vision_config=VISION, text_config={**_TEXT, "pad_token_id": 0}, projection_dim=24
            )
        ),
        "clip-padded",
    ),
    "chinese_clip": Case(
        "Chinese-CLIP",
        lambda: t.ChineseCLIPModel(
            t.ChineseCLIPConfig(
                vision_config=VISION, text_config={**_TEXT, "pad_token_id": 0}, projection_dim=24
            )
        ),
        "bert",
    ),
    "dinov2": Case("DINOv2", lambda: t.Dinov2Model(t.Dinov2Config(**VISION))),
    "dinov2_with_registers": Case(
        "DINOv2 with registers",
        lambda: t.Dinov2WithRegistersModel(
            t.Dinov2WithRegistersConfig(**VISION, num_register_tokens=4)
        ),
    ),
    "dinov3_vit": Case(
        "DINOv3 ViT",
        lambda: t.DINOv3ViTModel(t.DINOv3ViTConfig(**VISION, num_register_tokens=4)),
    ),
    "dinov3_convnext": Case(
        "DINOv3 ConvNeXt",
        lambda: t.DINOv3ConvNextModel(
            t.DINOv3ConvNextConfig(hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 2, 1])
        ),
    ),
    "mlcd": Case(
        "MLCD, RICE",
        lambda: t.MLCDVisionModel(t.MLCDVisionConfig(**VISION)),
    ),
    "vit": Case("ViT", lambda: t.ViTModel(t.ViTConfig(**VISION))),
    "convnext": Case(
        "ConvNeXt",
        lambda: t.ConvNextModel(
            t.ConvNextConfig(hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 2, 1])
        ),
        processor=convnext_processor,
    ),
    "convnextv2": Case(
        "ConvNeXt V2",
        lambda: t.ConvNextV2Model(
            t.ConvNextV2Config(hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 2, 1])
        ),
        processor=convnext_processor,
    ),
    "efficientnet": Case(
        "EfficientNet",
        lambda: t.EfficientNetModel(
            t.EfficientNetConfig(
                width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320, image_size=SIDE
            )
        ),
        processor=efficientnet_processor,
    ),
    "mobilenet_v2": Case(
        "MobileNetV2",
        lambda: t.MobileNetV2Model(t.MobileNetV2Config(depth_multiplier=0.25, image_size=SIDE)),
    ),
    "resnet": Case(
        "ResNet",
        lambda: t.ResNetModel(
            t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1])
        ),
    ),
    "swin": Case(
        "Swin",
        lambda: t.SwinModel(
            t.SwinConfig(
                image_size=SIDE, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2],
                window_size=4,
            )
        ),
    ),
}  # fmt: skip


def write_model(case: Case, folder: Path, *, seed: int = 0) -> torch.nn.Module:
    """Writes weights, configs, image processor and tokenizer; returns the model."""
    torch.manual_seed(seed)
    model = case.build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
        if case.texts is not None:
            model.logit_scale.fill_(2.0)
    model.save_pretrained(folder)
    open_processor(case).save_pretrained(folder)
    if case.texts is not None:
        write_tokenizer(folder, case.texts)
    return model
