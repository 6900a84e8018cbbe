"""The captions of a source's images, stored in columns."""

from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import pyarrow as pa

from mlcd.images.entries import Entries
from mlcd.images.matched_keys import Unmatched, match_keys
from mlcd.images.source import Source

_BLOCK: Final = 1 << 16  # captions converted to Python objects at a time


@dataclass(frozen=True)
class Captions:
    """The captions of n images, any number of each.

    texts: [n] large_list of large_string. Memory is 8 bytes per image, and 8
    bytes plus the text per caption. unmatched: names in a caption table that match no image.
    """

    texts: pa.LargeListArray
    unmatched: Unmatched

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def num_texts(self) -> int:
        return len(self.texts.flatten())

    def of(self, index: int) -> tuple[str, ...]:
        """Returns the captions of the image at `index`, in the order of the source."""
        return tuple(self.texts[index].as_py())


def read_captions(source: Source, entries: Entries) -> Captions:
    """Reads the captions beside the images of a source; an image may have none.

    entries: all or some entries of the source. Raises InvalidInput naming a caption that is not
    text or matches two images, Unavailable if a file system fails.
    """
    keys, texts = [], []
    captions = source.captions()
    while block := list(islice(captions, _BLOCK)):
        keys.append(pa.array([key for key, _ in block], pa.large_string()))
        texts.append(pa.array([text for _, text in block], pa.large_string()))
    matched = match_keys(
        pa.chunked_array(keys, pa.large_string()), entries.key_column(), source.location
    )
    index_of_text = matched.indices
    order = np.argsort(index_of_text, kind="stable")
    order = order[index_of_text[order] >= 0]
    counts = np.bincount(index_of_text[order], minlength=len(entries))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    values = pa.concat_arrays(
        pa.chunked_array(texts, pa.large_string()).take(pa.array(order, pa.int64())).chunks
        or [pa.array([], pa.large_string())]
    )
    lists = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)
    return Captions(lists, matched.unmatched)
