"""The error of the ways in which a GPU may compute a vision transformer in bf16, on the CPU.

    python benchmarks/bf16_forms.py [--tower b32|l14]

Each computes eight smooth random images, from coarse to fine, by the same random weights, and is
compared with fp32:

  products        products in bf16; norms and the residual stream in fp32
  products+silu   the same with the activation folded into the weights
  trunk           everything between pixels and the unit row in bf16
  trunk+silu      the same with the activation folded, as the engine torch does on a GPU
"""

import argparse
from collections.abc import Callable
from copy import deepcopy

import torch
from encode import TOWERS, random_model, tower_config
from torch import Tensor
from torch.nn import functional

from mlcd.encoders.torch import fold_activations, round_products
from mlcd.models.servable import Servable

NUM_IMAGES = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tower", choices=sorted(TOWERS), default="b32")
    tower = parser.parse_args().tower
    model = random_model(tower_config(tower)).eval().requires_grad_(requires_grad=False)
    folded = deepcopy(model)
    fold_activations(folded)
    images = smooth_images(model.preprocess.crop)
    forms: dict[str, tuple[Callable[[Servable, Tensor], Tensor], Servable]] = {
        "products": (of_products, model),
        "products+silu": (of_products, folded),
        "trunk": (of_trunk, model),
        "trunk+silu": (of_trunk, folded),
    }
    with torch.inference_mode():
        exact = model(images)
        for name, (compute, weights) in forms.items():
            errors = 1 - functional.cosine_similarity(
                compute(deepcopy(weights), images).double(), exact.double()
            )
            print(
                f"{tower} {name}: smallest cosine {1 - errors.max().item():.7f}, "
                f"1 - cosine {errors.mean().item():.2g} on average"
            )


def smooth_images(side: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    images = [
        functional.interpolate(
            torch.rand((1, 3, 2 + 3 * number, 2 + 3 * number), generator=generator),
            size=(side, side),
            mode="bicubic",
        )
        for number in range(NUM_IMAGES)
    ]
    return (torch.cat(images).clamp(0, 1) * 255).to(torch.uint8)


def of_products(model: Servable, images: Tensor) -> Tensor:
    round_products(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        return model(images)


def of_trunk(model: Servable, images: Tensor) -> Tensor:
    trunk = model.trunk.to(torch.bfloat16)
    return functional.normalize(trunk(model.normalized(images).bfloat16()).float(), dim=1)


if __name__ == "__main__":
    main()
