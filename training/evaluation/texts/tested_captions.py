"""The captions of the tested images: those that lie beside them, or those of a table."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlcd.errors import ConfigInvalid, InvalidInput, NotFound
from mlcd.images.caption_files import captions_in_table
from mlcd.images.captions import read_captions
from mlcd.images.matched_keys import Unmatched, match_keys
from mlcd.training.evaluation.texts.karpathy import read_tested_captions
from mlcd.training.evaluation.texts.tested import Tested, TestedSource


@dataclass(frozen=True)
class TestedCaptions:
    """The captions of every tested image, () for one without. unmatched: names of no image."""

    texts: list[tuple[str, ...]]
    unmatched: Unmatched

    def facts(self) -> dict[str, int]:
        """Returns how many images lack a caption, and how many names match none."""
        without = sum(not texts for texts in self.texts)
        return {"without_caption": without, "unmatched": self.unmatched.num}


def captions_of(
    tested: Tested, table: Path | None, *, most: int | None = None, may_be_unmatched: bool = False
) -> TestedCaptions:
    """Returns the captions of the tested images.

    table: a .jsonl or .csv of paths and captions, or a split of Karpathy's, in place of those
    beside the images. most: the number that is kept of an image's, the first ones.
    may_be_unmatched: captions of no image are counted instead of refused. Raises ConfigInvalid if
    nothing tells them, InvalidInput for a table with captions of no image.
    """
    if table is not None:
        captions_of_image, unmatched = _in_table(tested, table)
    elif isinstance(tested, TestedSource):
        captions = read_captions(tested.source, tested.source.entries)
        captions_of_image = [captions.of(index) for index in range(len(captions))]
        unmatched = captions.unmatched
    else:
        raise ConfigInvalid(
            f"no captions lie beside the embeddings {tested.location}",
            remedy="give a .jsonl or .csv of them with --captions",
        )
    name = f"the captions of {tested.location}" if table is None else str(table)
    unmatched.check(name, tested.location, may_be_unmatched=may_be_unmatched)
    return TestedCaptions([texts[:most] for texts in captions_of_image], unmatched)


def _in_table(tested: Tested, table: Path) -> tuple[list[tuple[str, ...]], Unmatched]:
    if not table.is_file():
        raise NotFound(f"no table of captions at {table}")
    if table.suffix == ".json":
        places, captions = read_tested_captions(table)
        # COCO's images lie in two folders, or all in one
        inside, flat = (match_keys(names, tested.keys, str(table)) for names in places)
        indices = np.where(inside.indices >= 0, inside.indices, flat.indices)
        strange = list(dict.fromkeys(np.asarray(places[1], object)[indices < 0]))
        num_keys = flat.unmatched.num_keys
        unmatched = Unmatched(len(strange), num_keys, next(iter(strange), None))
    else:
        with table.open("rb") as file:
            rows = list(captions_in_table(str(table), file))
        matched = match_keys([path for path, _ in rows], tested.keys, str(table))
        captions = [caption for _, caption in rows]
        indices, unmatched = matched.indices, matched.unmatched
    if not captions:
        raise InvalidInput(
            f"{table} must hold at least one caption", remedy="give rows of path and caption"
        )
    texts: list[list[str]] = [[] for _ in tested.keys]
    for index, caption in zip(indices.tolist(), captions, strict=True):
        if index >= 0:
            texts[index].append(caption)
    return [tuple(image_texts) for image_texts in texts], unmatched
