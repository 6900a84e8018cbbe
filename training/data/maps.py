"""Shares a large training set among the processes of a machine: all of them map the same files.

A separate process joins images and labels and writes the files, so that all memory of the join is
freed. The files are in the user's cache directory and are deleted as soon as all processes have
opened them, so none is left behind or becomes outdated.
"""

import json
import logging
import multiprocessing
import secrets
import shutil
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from platformdirs import user_cache_path

from mlcd.errors import MlcdError, Unavailable
from mlcd.images.entries import Entries
from mlcd.images.sources import open_source
from mlcd.training.data.data_config import MixedSource
from mlcd.training.data.dataset import Dataset, Part, label_tables, open_dataset
from mlcd.training.data.settings import DatasetSettings
from mlcd.training.processes import Processes

_log = logging.getLogger(__name__)

_MIN_MAPPED: Final = 1 << 20  # labeled images; fewer take each process only about 100 MiB
_LEFTOVER_S: Final = 86_400.0  # folders of killed processes are removed after a day
_FACTS: Final = "facts.json"
_COLUMNS: Final = ("labels", "sha256", "scores")


def open_shared_dataset(config: DatasetSettings, processes: Processes) -> Dataset:
    """Opens the data set as `open_dataset` does; a large data set is shared in mapped files.

    If the cache directory cannot be written, each process opens its own copy. Every process calls
    it, and if one raises, all do.
    """
    token = processes.world.broadcast(secrets.token_hex(8))
    leader = processes.world.rank - processes.local_rank
    folder = user_cache_path("mlcd", appauthor=False) / "data" / f"{token}-{leader}"
    try:
        with processes.failing_together():
            tables = label_tables(config, verify_files=False)
            if sum(table.num_rows for table in tables) < _MIN_MAPPED:
                return open_dataset(config)
            with processes.lead(f"data/{token}"):
                if processes.local_rank == 0:
                    _write_in_process(config, folder)
                return open_maps(config, folder) if folder.is_dir() else open_dataset(config)
    finally:
        if processes.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _write_in_process(config: DatasetSettings, folder: Path) -> None:
    """Writes the files of a data set in another process, and raises that process's error.

    If the folder cannot be written, it is removed and a warning is logged.
    """
    try:
        _remove_leftovers(folder.parent)
        folder.mkdir(parents=True)
    except OSError as error:
        _warn(folder, error)
        return
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_join_and_write, args=(config, folder, sending), daemon=True)
    process.start()
    sending.close()
    try:
        warnings, failure = receiving.recv()
    except EOFError as ended:
        raise Unavailable(
            "the process that joins images and labels was killed",
            remedy="often memory ran out: free some, or use a machine with more",
        ) from ended
    finally:
        process.join()
    for warning in warnings:
        _log.warning("%s", warning)
    if failure is not None:
        raise failure


def _join_and_write(config: DatasetSettings, folder: Path, parent: Connection) -> None:
    messages = _Messages(logging.WARNING)
    logging.getLogger().addHandler(messages)
    failure: Exception | None = None
    try:
        dataset = open_dataset(config)
        try:
            write_maps(dataset, folder)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            _warn(folder, error)
    except MlcdError as error:
        failure = error
    parent.send((messages.messages, failure))


def _warn(folder: Path, error: OSError) -> None:
    _log.warning(
        "%s cannot be written (%s), so each process keeps all keys and labels in its own memory; "
        "set another cache directory with XDG_CACHE_HOME",
        folder.parent,
        error.strerror,
    )


class _Messages(logging.Handler):
    """A log handler that collects messages to send to another process."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def write_maps(dataset: Dataset, folder: Path) -> None:
    """Writes the columns of a data set into an empty folder, for `open_maps`. Raises OSError."""
    for index, part in enumerate(dataset.parts):
        part.entries.write(folder / f"{index}.arrow")
        for name in _COLUMNS:
            if (column := getattr(part, name)) is not None:
                np.save(_column(folder, index, name), column)
    facts = {
        "listings": [part.listing_digest for part in dataset.parts],
        "num_unlabeled": dataset.num_unlabeled,
        "num_missing": dataset.num_missing,
    }
    (folder / _FACTS).write_text(json.dumps(facts))


def open_maps(config: DatasetSettings, folder: Path) -> Dataset:
    """Opens the files of `write_maps` for the same config; they may be deleted afterwards."""
    facts: dict[str, Any] = json.loads((folder / _FACTS).read_text())
    parts = [
        _part(source, folder, index, listing)
        for index, (source, listing) in enumerate(
            zip(config.data.sources, facts["listings"], strict=True)
        )
    ]
    # The process that joined images and labels has verified the files.
    tables = label_tables(config, verify_files=False)
    return Dataset.of(parts, tables, facts["num_unlabeled"], facts["num_missing"])


def _part(mixed: MixedSource, folder: Path, index: int, listing: str) -> Part:
    labels, sha256, scores = (_map_column(_column(folder, index, name)) for name in _COLUMNS)
    assert labels is not None
    assert sha256 is not None
    source, entries = open_source(mixed.images), Entries.open_mapped(folder / f"{index}.arrow")
    return Part(source, entries, labels, sha256, mixed.weight, scores, listing)


def _column(folder: Path, index: int, name: str) -> Path:
    return folder / f"{index}.{name}.npy"


def _map_column(path: Path) -> NDArray[Any] | None:
    # A plain array on the same memory, because reading rows of np.memmap takes twice as long.
    return np.asarray(np.load(path, mmap_mode="r")) if path.is_file() else None


def _remove_leftovers(folder: Path) -> None:
    with suppress(OSError):
        for old in folder.iterdir():
            if time.time() - old.stat().st_mtime > _LEFTOVER_S:
                shutil.rmtree(old, ignore_errors=True)
