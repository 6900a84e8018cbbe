"""Images in one zip, which a study keeps."""

import zipfile
from collections.abc import Iterable
from pathlib import Path


def write_zip(path: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """Writes named files unchanged into a zip, published by rename."""
    written = path.with_suffix(".partial")
    with zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files:
            archive.writestr(name, data)
    written.rename(path)
