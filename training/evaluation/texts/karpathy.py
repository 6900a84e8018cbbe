"""Karpathy's splits of Flickr30k and COCO, as he published them: `dataset_*.json`."""

import json
from pathlib import Path

from mlcd.errors import InvalidInput


def read_tested_captions(path: Path) -> tuple[tuple[list[str], list[str]], list[str]]:
    """Returns the captions of the images in the test part, and the names of their images: with the
    folder that COCO has an image in, and without.

    Raises InvalidInput if the file is not such a split.
    """
    placed: list[str] = []
    names: list[str] = []
    captions: list[str] = []
    try:
        for image in json.loads(path.read_bytes())["images"]:
            if image["split"] == "test":
                name, texts = (
                    image["filename"],
                    [sentence["raw"] for sentence in image["sentences"]],
                )
                folder = image.get("filepath")
                placed += [f"{folder}/{name}" if folder else name] * len(texts)
                names += [name] * len(texts)
                captions += texts
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"{path} is not a split of Karpathy's: it needs images with filename, split and"
            " sentences",
            remedy="give his dataset_coco.json or dataset_flickr30k.json, or a .jsonl or .csv",
        ) from error
    return (placed, names), captions
