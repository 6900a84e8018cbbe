"""The captions of a source's images, in columns as its entries are."""

from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import pyarrow as pa

from mlcd.images.entries import Entries
from mlcd.images.matched_keys import Unmatched, match_keys
from mlcd.images.source import Source

_BLOCK: Final = 1 << 16  # captions that are Python objects at a time


@dataclass(frozen=True)
class Captions:
    """The captions of n images, any number of each.

    texts: [n] large_list of large_string. An image takes 8 bytes, a caption 8 and its own.
    unmatched: names in a table beside the images that match none of them.
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
    """Reads the captions that lie beside the images of a source; () for an image without.

    entries: those of the source, or some of them. Raises InvalidInput naming a caption that is not
    text or may be of two images, Unavailable where a file system fails.
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
