"""Karpathy's splits of Flickr30k and COCO, as he published them: `dataset_*.json`."""

import json
from collections.abc import Iterator
from pathlib import Path

from mlcd.errors import InvalidInput


def tested_by_karpathy(path: Path) -> Iterator[tuple[str, str]]:
    """Yields a path and a caption of each image in the test part.

    A path is named with the folder that COCO has it in, and without. Raises InvalidInput if the
    file is not such a split.
    """
    try:
        images = json.loads(path.read_text(encoding="utf-8"))["images"]
        for image in images:
            if image["split"] == "test":
                name, captions = image["filename"], [each["raw"] for each in image["sentences"]]
                folder = image.get("filepath")
                for place in (name, f"{folder}/{name}") if folder else (name,):
                    yield from ((place, caption) for caption in captions)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"{path} is no split of Karpathy's: it needs images with filename, split and sentences",
            remedy="give his dataset_coco.json or dataset_flickr30k.json, or a .jsonl or .csv",
        ) from error
