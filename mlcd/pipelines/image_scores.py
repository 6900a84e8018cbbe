"""The pixel scores of many images, part by part: a killed process goes on at the first part."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.disk import replacing
from mlcd.cores import available_cores
from mlcd.images.entries import Entries
from mlcd.images.prefetch import scores_all
from mlcd.images.source import Source
from mlcd.pipelines.encoded import PART_ENTRIES
from mlcd.progress import Meter
from mlcd.types import ISSUES


def image_scores(
    source: Source, entries: Entries, *, meter: Meter, notes: Path | None
) -> NDArray[np.float64]:
    """Returns the pixel scores of each image, [N, 6]; NaN where an image cannot be used.

    notes: the folder of the parts that are finished, in hidden files; None keeps none.
    """
    scores = np.full((len(entries), len(ISSUES)), np.nan)
    for start in range(0, len(entries), PART_ENTRIES):
        part = slice(start, min(start + PART_ENTRIES, len(entries)))
        note = None if notes is None else notes / f".scores-{start:09d}.npy"
        if note is not None and note.is_file():
            scores[part] = np.load(note, allow_pickle=False)
            meter.advance(part.stop - part.start)
            continue
        found = scores_all(source, entries[part], num_threads=available_cores())
        for row, score in enumerate(found, start):
            if score is not None:
                scores[row] = score
            meter.advance()
        if note is not None:
            with replacing(note) as temporary, temporary.open("wb") as file:
                np.save(file, scores[part], allow_pickle=False)
    return scores
