"""Karpathy's splits of Flickr30k and COCO, as he published them: `dataset_*.json`."""

import json
from pathlib import Path

from mlcd.errors import InvalidInput


def read_tested_captions(path: Path) -> tuple[tuple[list[str], list[str]], list[str]]:
    """Returns ((image names with COCO's folder, image names without), captions) of the test part.

    All have one entry per caption. Raises InvalidInput if the file is not such a split.
    """
    names_in_folders: list[str] = []
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
                names_in_folders += [f"{folder}/{name}" if folder else name] * len(texts)
                names += [name] * len(texts)
                captions += texts
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"{path} is not a split of Karpathy: it must have images with filename, split and"
            " sentences",
            remedy="give his dataset_coco.json or dataset_flickr30k.json, or a .jsonl or .csv",
        ) from error
    return (names_in_folders, names), captions
