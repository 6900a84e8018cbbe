"""The pixel scores of many images, part by part: a killed process goes on at the first part."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.disk import replacing
from mlcd.images.entries import Entries
from mlcd.images.prefetch import scores_all
from mlcd.images.source import Source
from mlcd.parts.encoded import PART_ENTRIES
from mlcd.progress import Meter
from mlcd.types import ISSUES

# from parts of the images to the scores of each, in order
ScoreParts: TypeAlias = Callable[[Sequence[slice]], Iterator[NDArray[np.float64]]]


def image_scores(
    num: int, score_parts: ScoreParts, *, meter: Meter, notes: Path | None
) -> NDArray[np.float64]:
    """Returns the pixel scores of so many images, [N, 6]; NaN where an image cannot be used.

    score_parts: finds those of parts that are not noted, and advances the meter by them. notes: the
    folder of the parts that are finished, in hidden files; None keeps none.
    """
    parts = [slice(start, min(start + PART_ENTRIES, num)) for start in range(0, num, PART_ENTRIES)]
    noted = {
        part.start: _note(notes, part)
        for part in parts
        if notes is not None and _note(notes, part).is_file()
    }
    made = score_parts([part for part in parts if part.start not in noted])
    scores = [np.empty((0, len(ISSUES)))]
    for part in parts:
        if part.start in noted:
            scores.append(np.load(noted[part.start], allow_pickle=False))
            meter.advance(part.stop - part.start)
            continue
        scores.append(next(made))
        if notes is not None:
            with replacing(_note(notes, part)) as temporary, temporary.open("wb") as file:
                np.save(file, scores[-1], allow_pickle=False)
    return np.concatenate(scores)


def _note(notes: Path, part: slice) -> Path:
    return notes / f".scores-{part.start:09d}.npy"


def scores_of(
    source: Source, entries: Entries, *, num_threads: int, on_done: Callable[[], object]
) -> NDArray[np.float64]:
    """Returns the pixel scores of each entry, [N, 6]; NaN where an image cannot be used."""
    scores = np.full((len(entries), len(ISSUES)), np.nan)
    for row, score in enumerate(scores_all(source, entries, num_threads=num_threads)):
        if score is not None:
            scores[row] = score
        on_done()
    return scores
