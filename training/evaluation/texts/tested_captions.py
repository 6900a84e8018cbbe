"""The captions of the tested images: those that lie beside them, or those of a table."""

from collections.abc import Iterator
from pathlib import Path

from mlcd.errors import ConfigInvalid, InvalidInput, NotFound
from mlcd.images.caption_files import captions_in_table
from mlcd.images.captions import read_captions
from training.evaluation.texts.karpathy import tested_by_karpathy
from training.evaluation.texts.tested import Tested, TestedSource


def captions_of(
    tested: Tested, table: Path | None, *, most: int | None = None
) -> list[tuple[str, ...]]:
    """Returns the captions of every tested image, () for one without.

    table: a .jsonl or .csv of paths and captions, or a split of Karpathy's, in place of those
    beside the images. most: the number that is kept of an image's, the first ones. Raises
    ConfigInvalid if nothing tells them, InvalidInput for a table that names none of the images.
    """
    if table is not None:
        found = _in_table(tested, table)
    elif isinstance(tested, TestedSource):
        captions = read_captions(tested.source, tested.source.entries)
        found = [captions.of(index) for index in range(len(captions))]
    else:
        raise ConfigInvalid(
            f"no captions lie beside the embeddings {tested.location}",
            remedy="give a .jsonl or .csv of them with --captions",
        )
    return [texts[:most] for texts in found]


def _in_table(tested: Tested, table: Path) -> list[tuple[str, ...]]:
    if not table.is_file():
        raise NotFound(f"there is no table of captions {table}")
    texts: dict[str, list[str]] = {}
    for path, caption in _rows(table):
        texts.setdefault(path, []).append(caption)
    if texts and not texts.keys() & set(tested.keys):
        raise InvalidInput(
            f"{table} names no image of {tested.location}, such as {next(iter(texts))}",
            remedy="its paths are to be relative to the images' folder",
        )
    return [tuple(texts.get(key, ())) for key in tested.keys]


def _rows(table: Path) -> Iterator[tuple[str, str]]:
    if table.suffix == ".json":
        yield from tested_by_karpathy(table)
        return
    with table.open(encoding="utf-8-sig", newline="") as lines:
        yield from captions_in_table(str(table), lines)
