"""Local copies of artifacts at URLs, identical byte for byte.

An artifact at a URL is copied to this machine before it is read; unchanged files are not copied
again.
"""

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from mlcd.artifacts.directories import Directory
from mlcd.artifacts.disk import hold_lock, lock_directory, translate_os_errors, write_synced
from mlcd.artifacts.listed_files import copy_files, is_hidden, read_listed
from mlcd.artifacts.manifest import MANIFEST, draft_path, parse_manifest
from mlcd.errors import Conflict, NotFound
from mlcd.locations import Location, artifact_path, copies_folder, url_of
from mlcd.progress import Reporter, Stages

_SILENT: Final = Reporter("silent")


def bring(path: Path, reporter: Stages = _SILENT) -> Path:
    """Updates the copy at `path` from the artifact at its URL, and returns the path; a path
    without a URL is returned unchanged.

    Raises NotFound if the URL lacks a finished artifact, ArtifactInvalid if it is damaged.
    """
    if (url := url_of(path)) is None:
        return path
    origin = Directory.at(url)
    listed = read_listed(origin)
    make_room(path)
    with translate_os_errors(path):
        path.mkdir(exist_ok=True)
        with hold_lock(path.with_name(f".{path.name}.lock")):
            copy = Directory.at(path)
            sizes = copy.sizes()
            has_same_manifest = MANIFEST in sizes and copy.read(MANIFEST) == listed.manifest

            def is_there(name: str) -> bool:
                entry = listed.files[name]
                return sizes.get(name) == entry.size_bytes and (
                    (has_same_manifest and listed.is_in_manifest(name))
                    or copy.measure(name) == entry
                )

            copy_files(listed, origin, copy, is_there, reporter)
            write_synced(path / MANIFEST, listed.manifest)
            for name in sizes.keys() - listed.files.keys() - {MANIFEST}:
                (path / name).unlink()
    return path


def make_room(path: Path) -> None:
    """Creates the folder of a copy. Raises InvalidInput if this process lacks permission."""
    if url_of(path) is not None:
        folder = copies_folder()
        with translate_os_errors(folder, remedy="name another cache with XDG_CACHE_HOME"):
            path.parent.mkdir(parents=True, exist_ok=True)


def fetch_copy(location: Location, reporter: Stages = _SILENT) -> Path:
    """Returns the path of the artifact at a path or URL, after `bring`."""
    return bring(artifact_path(location), reporter)


def is_finished(path: Path) -> bool:
    """Tells whether a finished artifact is at the path or, for a copy, at its URL.

    A copy is updated first, or removed if the artifact at its URL no longer exists.
    """
    try:
        bring(path)
    except NotFound:
        shutil.rmtree(path, ignore_errors=True)
    return (path / MANIFEST).is_file()


def forget(path: Path) -> None:
    """Removes the local draft and copy of an artifact at a URL, unless another process uses it."""
    if url_of(path) is None:
        return
    for folder in (draft_path(path), path):
        with suppress(Conflict, FileNotFoundError):
            lock = lock_directory(folder, fcntl.LOCK_EX, make=False)
            try:
                shutil.rmtree(folder)
            finally:
                os.close(lock)


def send_addition(path: Path, before: str, names: list[str], manifest: bytes) -> None:
    """Writes the new files of an extended copy to its URL, and then the new manifest.

    before: digest that the artifact at the URL must still have; otherwise raises Conflict.
    """
    if (url := url_of(path)) is None:
        return
    origin, copy = Directory.at(url), Directory.at(path)
    _check_digest(origin, before)
    for name in names:
        origin.copy_unverified(name, copy, (path / name).stat().st_size)
    _check_digest(origin, before)
    origin.write(MANIFEST, manifest)


def _check_digest(origin: Directory, digest: str) -> None:
    if parse_manifest(origin.read(MANIFEST), Path(origin.location)).digest != digest:
        raise Conflict(
            f"{origin.location} has grown meanwhile", remedy="run the same command again"
        )


def send_beside(path: Path) -> None:
    """Writes files that no manifest lists, such as user-assigned names, to the URL of a copy. Does
    nothing for a path without a URL.
    """
    if (url := url_of(path)) is None:
        return
    origin, copy = Directory.at(url), Directory.at(path)
    listed = read_listed(origin)
    for name in copy.sizes():
        if name == MANIFEST or is_hidden(name) or listed.is_in_manifest(name):
            continue
        if listed.files.get(name) != copy.measure(name):
            origin.copy_unverified(name, copy, (path / name).stat().st_size)
