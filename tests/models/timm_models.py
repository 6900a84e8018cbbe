"""Models of timm with random weights and few blocks, one of each architecture that runs here."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file

_TINY = {"embed_dim": 48, "depth": 2, "num_heads": 3}
_HALF = {"mean": [0.5] * 3, "std": [0.5] * 3}


@dataclass(frozen=True)
class Case:
    """An architecture. arguments: those of its constructor that make it small. fields: those of
    its preprocessing.
    """

    title: str
    architecture: str
    arguments: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    side: int = 64


CASES = {
    case.architecture: case
    for case in (
        Case(
            "Perception Encoder",
            "vit_pe_core_tiny_patch16_384",
            {**_TINY, "img_size": 64},
            {**_HALF, "crop_mode": "squash", "crop_pct": 1.0, "interpolation": "bilinear"},
        ),
        Case("EVA-02", "eva02_tiny_patch14_224", {**_TINY, "img_size": 56}, side=56),
        Case("ViTamin", "vitamin_small_224", {"img_size": 64}),
        Case("SigLIP, SigLIP 2", "vit_base_patch16_siglip_224", {**_TINY, "img_size": 64}, _HALF),
        Case("DINOv3 ViT", "vit_small_patch16_dinov3", {**_TINY, "img_size": 64}),
        Case("ConvNeXt", "convnext_atto", {"depths": [1, 1, 2, 1]}, {}),
        Case("EfficientNet", "efficientnet_b0", fields={"crop_pct": 1.0}),
        Case("MobileNetV4", "mobilenetv4_conv_small"),
        Case("ResNet", "resnet18", fields={"interpolation": "bilinear"}),
    )
}


def write_model(case: Case, folder: Path, *, seed: int = 0) -> torch.nn.Module:
    """Writes config.json and weights with a classifier, as timm's hub has them; returns the model
    without the classifier.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    whole = timm.create_model(case.architecture, num_classes=10, **case.arguments)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    save_file(
        {name: x.contiguous() for name, x in whole.state_dict().items()},
        folder / "model.safetensors",
    )
    cfg = {
        "input_size": [3, case.side, case.side],
        "interpolation": "bicubic",
        "crop_pct": 0.8,
        "crop_mode": "center",
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "num_classes": 10,
        "classifier": whole.default_cfg["classifier"],
        "first_conv": whole.default_cfg["first_conv"],
        **case.fields,
    }
    config = {
        "architecture": case.architecture,
        "num_classes": 10,
        "model_args": case.arguments,
        "pretrained_cfg": cfg,
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = timm.create_model(case.architecture, num_classes=0, **case.arguments)
    kept = {name: whole.state_dict()[name] for name in model.state_dict()}
    model.load_state_dict(kept)
    model.pretrained_cfg = cfg
    return model.eval()
