"""How far transformers' image processors by torchvision are from those by PIL, which mlcd equals.

    python benchmarks/processors.py shared/data/caltech101_20

Needs torchvision, a build for the installed torch; every tenth JPEG is compared, 200 at most.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from transformers import CLIPImageProcessor, SiglipImageProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

CASES = {
    "CLIP, bicubic": (CLIPImageProcessor, CLIPImageProcessorPil, 3),
    "SigLIP, bicubic": (SiglipImageProcessor, SiglipImageProcessorPil, 3),
    "SigLIP, bilinear": (SiglipImageProcessor, SiglipImageProcessorPil, 2),
}


def main(folder: Path) -> None:
    pictures = [Image.open(path).convert("RGB") for path in sorted(folder.rglob("*.jpg"))[:2000:10]]
    print(f"{len(pictures)} photographs, differences in levels of 255")
    for name, (by_torchvision, by_pil, resample) in CASES.items():
        options = {"do_rescale": False, "do_normalize": False, "resample": resample}
        processors = by_torchvision(**options), by_pil(**options)
        differences = []
        for picture in pictures:
            pixels = [
                np.asarray(processor(picture, return_tensors="pt")["pixel_values"], np.float64)
                for processor in processors
            ]
            differences.append(np.abs(pixels[0] - pixels[1]))
        values = np.concatenate([each.ravel() for each in differences])
        print(
            f"{name}: most {values.max():.0f}, mean {values.mean():.4f}, {(values > 0).mean():.2%}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
