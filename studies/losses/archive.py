"""Images in one zip, which a study keeps and which can be sent to another machine."""

import io
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from PIL import Image

from mlcd.images.decode import decode
from mlcd.images.sources import open_source
from mlcd.images.transform import PreprocessSpec
from mlcd.keys import split_positions

_QUALITY: Final = 90


def write_zip(path: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """Writes named files unchanged into a zip, published by rename."""
    written = path.with_suffix(".partial")
    with zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files:
            archive.writestr(name, data)
    written.rename(path)


def shrunk(data: bytes, size: int) -> bytes:
    """Returns an encoded image unchanged if no side is longer than `size`.

    A larger one becomes the square that a tower takes, as JPEG.
    """
    if max(decode(data).size) <= size:
        return data
    square = PreprocessSpec(resize_shortest=size, crop=size).prepare(data)
    buffer = io.BytesIO()
    # Without subsampling=0, color would have half of the requested resolution.
    Image.fromarray(square.transpose(1, 2, 0)).save(buffer, "JPEG", quality=_QUALITY, subsampling=0)
    return buffer.getvalue()


def pack_photographs(shards: str, path: Path, per_class: int) -> None:
    """Writes so many photographs of each class by the hash of the key, one folder per class,
    unchanged.
    """
    source = open_source(shards)
    entries = source.entries
    classes = [str(entry.class_name) for entry in entries]
    positions = split_positions([entry.key for entry in entries], classes)
    counts = {name: classes.count(name) for name in set(classes)}
    write_zip(
        path,
        (
            (f"{name}/{Path(entry.key).name}", source.read(entry))
            for entry, position, name in zip(entries, positions.tolist(), classes, strict=True)
            if position * counts[name] < per_class
        ),
    )
