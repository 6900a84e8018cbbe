"""The keys that a table or a list states, and the images that they mean."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import InvalidInput
from mlcd.images.matched_keys import Keys, match_keys
from mlcd.types import SampleKey

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ListedKeys:
    """The keys of images in a table.

    table: its name for people. may_be_unmatched: keys of no image are left out instead of refused.
    """

    keys: Sequence[SampleKey]
    table: str
    may_be_unmatched: bool = False

    def places(self, keys: Keys, images: str) -> NDArray[np.int64]:
        """Returns the places of the listed images among `keys`, in the order of the table; raises
        as `indices` does.
        """
        indices = self.indices(keys, images)
        return indices[indices >= 0]

    def indices(self, keys: Keys, images: str) -> NDArray[np.int64]:
        """Returns the place of each listed image among `keys`, -1 for one that is not there, which
        are logged.

        images: their place for people. Raises InvalidInput for the key of no image unless these may
        be, and for two keys of one image.
        """
        matched = match_keys(self.keys, keys, self.table)
        matched.unmatched.check(self.table, images, may_be_unmatched=self.may_be_unmatched)
        if matched.unmatched.num:
            _log.warning("%s: %s", self.table, matched.unmatched)
        places = matched.indices[matched.indices >= 0]
        distinct, first, counts = np.unique(places, return_index=True, return_counts=True)
        if len(distinct) < len(places):
            place = int(places[np.min(first[counts > 1])])
            twice = [
                key
                for key, index in zip(self.keys, matched.indices.tolist(), strict=True)
                if index == place
            ]
            raise InvalidInput(
                f"{self.table} has one image twice: {twice[0]!a} and {twice[1]!a}",
                remedy="give each image once",
            )
        return matched.indices
