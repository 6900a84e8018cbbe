"""The index of a collection on disk: a finished artifact, made again and again, never changed.

rows.npy       int64 [N]: the ledger's row numbers, by position
vectors.npy    float32 [N, D]: the vectors, mapped and not read; scans and scores use them
index.faiss    where there are enough rows for an index
"""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Parent, Request, open_artifact
from mlcd.errors import ArtifactInvalid
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

    rows: int64 [N]. vectors: float32 [N, D]. tuned: the index over them, by position.
    """

    number: int
    rows: NDArray[np.int64]
    vectors: Embeddings
    tuned: Tuned


def nothing(dimension: int) -> Generation:
    """Returns the empty generation, with which a collection begins or replaces a damaged index."""
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
    """Indexes the vectors of `blocks`, given in random order, publishes all of it by one rename and
    opens it.

    advance: is called with the number of further rows done, 0 at other steps; what it raises ends
    the work.
    """
    request = Request(KIND, {"generation": number, "recall": target}, parents, fingerprint)
    out = folder / f"{number:08d}"
    advance(0)
    with Draft(out, request, fresh=True) as draft:
        with draft.write(ROWS) as path, path.open("wb") as file:
            np.save(file, rows, allow_pickle=False)
        with draft.write(VECTORS) as path:
            _write_vectors(path, _check_between_blocks(blocks, advance), (len(rows), dimension))
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
    """Returns the number of the newest generation; None where there is none."""
    return max(
        (int(path.name) for path in folder.glob("*") if _NUMBERED.fullmatch(path.name)),
        default=None,
    )


def open_newest(
    folder: Path, *, dimension: int, fingerprint: Fingerprint
) -> tuple[Generation, bool]:
    """Returns the newest generation that is whole, and whether a newer one was damaged; every byte
    is checked.
    """
    number = newest_number(folder)
    if number is None:
        return nothing(dimension), False
    try:
        return _open(folder / f"{number:08d}", number, dimension, fingerprint), False
    except ArtifactInvalid:
        # An older one would be right, too, but it would save only seconds, and is not worth a
        # second path to test.
        empty = nothing(dimension)
        return Generation(number, empty.rows, empty.vectors, empty.tuned), True


def _open(path: Path, number: int, dimension: int, fingerprint: Fingerprint) -> Generation:
    artifact = open_artifact(path, KIND)
    if artifact.fingerprint != fingerprint:
        raise ArtifactInvalid(f"{path} is of another model")
    rows, vectors = (
        np.load(artifact.file(ROWS), allow_pickle=False),
        _map_vectors(artifact.file(VECTORS)),
    )
    if vectors.shape != (len(rows), dimension):
        raise ArtifactInvalid(f"{path} has {len(rows)} rows and vectors {list(vectors.shape)}")
    facts = artifact.summary
    index = None
    if facts["kind"] != "flat":
        from mlcd.indexes.faiss import FaissIndex  # a flat collection does without

        index = FaissIndex.read(artifact.file(INDEX))
    recall = Recall(**facts["recall"]) if facts["recall"] else None
    return Generation(
        number,
        rows,
        vectors,
        Tuned(facts["kind"], index, facts["effort"], recall, widening_of(facts["kind"])),
    )


def remove_before(folder: Path, number: int) -> None:
    """Removes older generations and the remains of killed processes.

    A process that has one mapped keeps it until its last reader ends.
    """
    for path in folder.glob("*"):
        if path.name != f"{number:08d}":
            shutil.rmtree(path, ignore_errors=True)


def _check_between_blocks(
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
    """Maps the vectors of a file that `_write_vectors` made, without a descriptor; numpy's maps
    keep one each.
    """
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        start = file.tell()
    with pa.memory_map(str(path)) as file:
        vectors = np.frombuffer(file.read_buffer(), dtype, offset=start)
    return vectors.reshape(shape)
