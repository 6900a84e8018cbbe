"""The captions of the test images: from files beside the images, or from a table."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlcd.errors import ConfigInvalid, InvalidInput, NotFound
from mlcd.images.caption_files import captions_in_table
from mlcd.images.captions import read_captions
from mlcd.images.matched_keys import Unmatched, match_keys
from mlcd.training.evaluation.texts.karpathy import read_tested_captions
from mlcd.training.evaluation.texts.tested import SourceTestImages, TestImages


@dataclass(frozen=True)
class TestedCaptions:
    """The captions of each test image, () for none. unmatched: image names that match no image."""

    texts: list[tuple[str, ...]]
    unmatched: Unmatched

    def facts(self) -> dict[str, int]:
        """Returns the numbers of images without a caption and of names that match no image."""
        without = sum(not texts for texts in self.texts)
        return {"without_caption": without, "unmatched": self.unmatched.num}


def captions_of(
    test_images: TestImages,
    table: Path | None,
    *,
    max_captions: int | None = None,
    may_be_unmatched: bool = False,
) -> TestedCaptions:
    """Returns the captions of the tested images.

    table: a .jsonl or .csv of paths and captions, or a split of Karpathy; None reads the captions
    beside the images. max_captions: largest number of captions per image; the first are kept.
    may_be_unmatched: count captions that match no image, instead of raising. Raises ConfigInvalid
    without a source of captions, InvalidInput for captions that match no image.
    """
    if table is not None:
        captions_of_image, unmatched = _read_table(test_images, table)
    elif isinstance(test_images, SourceTestImages):
        captions = read_captions(test_images.source, test_images.source.entries)
        captions_of_image = [captions.of(index) for index in range(len(captions))]
        unmatched = captions.unmatched
    else:
        raise ConfigInvalid(
            f"the embeddings {test_images.location} contain no captions",
            remedy="give a .jsonl or .csv of captions with --captions",
        )
    name = f"the captions of {test_images.location}" if table is None else str(table)
    unmatched.check(name, test_images.location, may_be_unmatched=may_be_unmatched)
    return TestedCaptions([texts[:max_captions] for texts in captions_of_image], unmatched)


def _read_table(test_images: TestImages, table: Path) -> tuple[list[tuple[str, ...]], Unmatched]:
    if not table.is_file():
        raise NotFound(f"no table of captions at {table}")
    if table.suffix == ".json":
        names, captions = read_tested_captions(table)
        # COCO's images are in two folders, or all in one folder.
        inside, flat = (
            match_keys(image_names, test_images.keys, str(table)) for image_names in names
        )
        indices = np.where(inside.indices >= 0, inside.indices, flat.indices)
        unmatched_names = list(dict.fromkeys(np.asarray(names[1], object)[indices < 0]))
        num_keys = flat.unmatched.num_keys
        unmatched = Unmatched(len(unmatched_names), num_keys, next(iter(unmatched_names), None))
    else:
        with table.open("rb") as file:
            rows = list(captions_in_table(str(table), file))
        matched = match_keys([path for path, _ in rows], test_images.keys, str(table))
        captions = [caption for _, caption in rows]
        indices, unmatched = matched.indices, matched.unmatched
    if not captions:
        raise InvalidInput(
            f"{table} must contain at least one caption", remedy="give rows of path and caption"
        )
    texts: list[list[str]] = [[] for _ in test_images.keys]
    for index, caption in zip(indices.tolist(), captions, strict=True):
        if index >= 0:
            texts[index].append(caption)
    return [tuple(image_texts) for image_texts in texts], unmatched
