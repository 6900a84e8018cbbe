"""Tiny two-tower checkpoints of transformers with random weights, as tests export them."""

import json
from pathlib import Path

import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPModel

from mlcd.models.configs import clip_preprocessing, write_hf_preprocessing

CONTEXT, SIDE, DIMENSION = 12, 16, 32
_WORDS = [
    "a",
    "photo",
    "of",
    "the",
    "cat",
    "dog",
    "two",
    "dogs",
    "an",
    "old",
    "red",
    "on",
    "in",
    "and",
    "with",
    "man",
    "woman",
    "at",
    "sky",
    "by",
]
_START, _END = 38, 39


def write_two_tower_checkpoint(folder: Path, *, seed: int = 0) -> torch.nn.Module:
    """Writes weights, configs, preprocessing and tokenizer; returns transformers' CLIPModel."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    vision = {**sizes, "hidden_size": 32, "patch_size": 8, "image_size": SIDE}
    text = {
        **sizes,
        "hidden_size": 32,
        "vocab_size": 40,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": _END,
        "bos_token_id": _START,
        "eos_token_id": _END,
    }
    model = CLIPModel(CLIPConfig(vision_config=vision, text_config=text, projection_dim=DIMENSION))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * (0.15 if parameter.dim() > 1 else 0.1))
            if parameter.dim() == 1 and parameter.shape[0] == 32:
                parameter.add_(0.5)
        model.logit_scale.fill_(2.0)
    model.save_pretrained(folder)
    spec = clip_preprocessing(SIDE)
    (folder / "preprocessor_config.json").write_text(json.dumps(write_hf_preprocessing(spec)))
    write_tokenizer(folder, "clip")
    return model.eval()


def write_tokenizer(folder: Path, kind: str) -> None:
    """Writes a tokenizer of words: of clip (padded with its end), clip-padded, bert or siglip."""
    words = {"<pad>": 0, "<unk>": 1, **{word: 2 + n for n, word in enumerate(_WORDS)}}
    words |= {character: len(words) + n for n, character in enumerate(".,!-?:;4")}
    words |= {"<start>": _START, "<end>": _END}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind != "siglip":
        backend.post_processor = processors.TemplateProcessing(
            single="<start> $A <end>", special_tokens=[("<start>", _START), ("<end>", _END)]
        )
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "pad_token": "<end>" if kind == "clip" else "<pad>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if kind == "siglip":
        settings["model_input_names"] = ["input_ids"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
