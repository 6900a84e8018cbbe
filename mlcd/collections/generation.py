"""The index of a collection on disk: an immutable artifact; each rebuild writes a new generation.

rows.npy       int64 [N]: the ledger's row numbers, by position
vectors.npy    float32 [N, D]: the vectors, memory-mapped, for scans and rescoring
index.faiss    only with enough rows for an index
"""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Parent, Request, open_artifact
from mlcd.errors import ArtifactInvalid
from mlcd.indexes.gpu_vectors import GpuVectors
from mlcd.indexes.tuning import Recall, Tuned, tune, widening_of
from mlcd.types import Embeddings, Fingerprint

KIND: Final = "collection-index"
ROWS: Final = "rows.npy"
VECTORS: Final = "vectors.npy"
INDEX: Final = "index.faiss"
_NUMBERED: Final = re.compile(r"[0-9]{8}")


@dataclass(frozen=True)
class Generation:
    """One generation of the index.

    rows: int64 [N]. vectors: float32 [N, D]. tuned: the index, whose ids are positions. gpu: the
    copy of the vectors on a GPU.
    """

    number: int
    rows: NDArray[np.int64]
    vectors: Embeddings
    tuned: Tuned
    gpu: GpuVectors = field(default_factory=GpuVectors, compare=False)


def empty_generation(dimension: int) -> Generation:
    """Returns the empty generation 0 of a new collection."""
    empty = np.empty((0, dimension), dtype=np.float32)
    return Generation(0, np.empty(0, dtype=np.int64), empty, Tuned("flat", None, None, None))


def write_generation(
    folder: Path,
    number: int,
    *,
    rows: NDArray[np.int64],
    blocks: Iterator[Embeddings],
    dimension: int,
    fingerprint: Fingerprint,
    target: float,
    parents: tuple[Parent, ...] = (),
    advance: Callable[[int], None] = lambda _: None,
) -> Generation:
    """Builds the index of the vectors, publishes the generation by one rename, and opens it.

    rows: row numbers, int64 [N]. blocks: their vectors, in the same, random, order. target: target
    recall. advance: see `mlcd.indexes.tuning.tune`.
    """
    request = Request(KIND, {"generation": number, "recall": target}, parents, fingerprint)
    out = folder / f"{number:08d}"
    advance(0)
    with Draft(out, request, fresh=True) as draft:
        with draft.write(ROWS) as path, path.open("wb") as file:
            np.save(file, rows, allow_pickle=False)
        with draft.write(VECTORS) as path:
            _write_vectors(path, _advance_per_block(blocks, advance), (len(rows), dimension))
        vectors = _map_vectors(draft.path / VECTORS)
        tuned = tune(vectors, target, advance=advance)
        if tuned.index is not None:
            with draft.write(INDEX) as path:
                tuned.index.write(path)
        draft.publish(
            summary={
                "items": len(rows),
                "kind": tuned.kind,
                "effort": tuned.effort,
                "recall": asdict(tuned.recall) if tuned.recall else None,
            }
        )
    return Generation(number, rows, _map_vectors(out / VECTORS), tuned)


def newest_number(folder: Path) -> int | None:
    """Returns the number of the newest generation; None if there is none."""
    return max(
        (int(path.name) for path in folder.glob("*") if _NUMBERED.fullmatch(path.name)),
        default=None,
    )


def open_newest(
    folder: Path, *, dimension: int, fingerprint: Fingerprint
) -> tuple[Generation, bool]:
    """Returns the newest generation, and whether it was damaged and is replaced by an empty one.
    Every byte is verified.
    """
    number = newest_number(folder)
    if number is None:
        return empty_generation(dimension), False
    try:
        return _open(folder / f"{number:08d}", number, dimension, fingerprint), False
    except ArtifactInvalid:
        # An older generation would be correct too, but it would save only seconds: not worth a
        # second path to test.
        empty = empty_generation(dimension)
        return Generation(number, empty.rows, empty.vectors, empty.tuned), True


def _open(path: Path, number: int, dimension: int, fingerprint: Fingerprint) -> Generation:
    artifact = open_artifact(path, KIND)
    if artifact.fingerprint != fingerprint:
        raise ArtifactInvalid(f"{path} was made for another model")
    rows = np.load(artifact.file(ROWS), allow_pickle=False)
    vectors = _map_vectors(artifact.file(VECTORS))
    if vectors.shape != (len(rows), dimension):
        raise ArtifactInvalid(
            f"the vectors of {path} must have shape {[len(rows), dimension]}, got"
            f" {list(vectors.shape)}"
        )
    facts = artifact.summary
    index = None
    if facts["kind"] != "flat":
        from mlcd.indexes.faiss import FaissIndex  # a flat collection does not need faiss

        index = FaissIndex.read(artifact.file(INDEX))
    recall = Recall(**facts["recall"]) if facts["recall"] else None
    return Generation(
        number,
        rows,
        vectors,
        Tuned(facts["kind"], index, facts["effort"], recall, widening_of(facts["kind"])),
    )


def remove_before(folder: Path, number: int) -> None:
    """Removes all generations but `number`, and the leftovers of killed processes.

    The memory map of a removed generation stays valid until its last reader ends.
    """
    for path in folder.glob("*"):
        if path.name != f"{number:08d}":
            shutil.rmtree(path, ignore_errors=True)


def _advance_per_block(
    blocks: Iterator[Embeddings], advance: Callable[[int], None]
) -> Iterator[Embeddings]:
    for block in blocks:
        advance(0)
        yield block


def _write_vectors(path: Path, blocks: Iterator[Embeddings], shape: tuple[int, int]) -> None:
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype="<f4").data)


def _map_vectors(path: Path) -> Embeddings:
    """Maps a file of `_write_vectors` without keeping a file descriptor open, unlike np.memmap."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        start = file.tell()
    with pa.memory_map(str(path)) as file:
        vectors = np.frombuffer(file.read_buffer(), dtype, offset=start)
    return vectors.reshape(shape)
