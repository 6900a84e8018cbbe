"""The growing buffers of a collection's state: one writer appends beyond what readers share."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.manifest import Parent
from mlcd.collections.changes import Effect
from mlcd.collections.columns import Columns
from mlcd.collections.generation import Generation, write_generation
from mlcd.collections.ledger import StoredItem
from mlcd.collections.searcher import Searcher
from mlcd.types import Embeddings, Fingerprint

_SMALLEST: Final = 256
_DEAD: Final = -1
_COPIED_ROWS: Final = 8192


class Growth:
    """The writer's buffers; each `Searcher` is a view of a prefix of them. Not thread-safe:
    readers use only finished searchers.
    """

    def __init__(self, generation: Generation, dimension: int) -> None:
        self._generation = generation
        num = len(generation.rows)
        self._delta = np.empty((_SMALLEST, dimension), dtype=np.float32)
        self._alive = np.zeros(num + _SMALLEST, dtype=np.bool_)
        self._rows = np.full(num + _SMALLEST, _DEAD, dtype=np.int64)
        self._rows[:num] = generation.rows
        self._num, self._num_alive = num, 0
        self._ids, self._metadata = [""] * num, [""] * num
        self._position_of: dict[str, int] = {}
        self._columns = Columns()

    def revive(self, position: int, item: StoredItem) -> None:
        """Marks an indexed position alive, because the ledger still has its row."""
        self._ids[position], self._metadata[position] = item.id, item.metadata
        self._fill(position, item.id, item.metadata)

    def append(self, item_id: str, row: int, vector: Embeddings, metadata: str) -> None:
        position, index = self._num, self._num - len(self._generation.rows)
        if index == len(self._delta):
            self._delta = np.concatenate([self._delta, np.empty_like(self._delta)])
        if position == len(self._alive):
            num_new = max(_SMALLEST, position)
            self._alive = np.concatenate([self._alive, np.zeros(num_new, dtype=np.bool_)])
            self._rows = np.concatenate([self._rows, np.full(num_new, _DEAD, dtype=np.int64)])
        self._delta[index], self._rows[position] = vector, row
        self._ids.append(item_id)
        self._metadata.append(metadata)
        self._num += 1
        self._fill(position, item_id, metadata)

    def _fill(self, position: int, item_id: str, metadata: str) -> None:
        if metadata != "{}":
            self._columns.append(position, json.loads(metadata))
        self._alive[position] = True
        self._num_alive += 1
        self._position_of[item_id] = position

    def kill(self, item_id: str) -> None:
        position = self._position_of.pop(item_id)
        self._alive[position] = False
        self._num_alive -= 1

    def apply(self, effects: Iterable[Effect]) -> list[int]:
        """Applies the effects, and returns the rows of the ledger that they removed."""
        freed_rows = []
        for effect in effects:
            position = self._position_of.get(effect.id)
            vector = effect.vector
            if vector is None and effect.row is not None:
                assert position is not None
                vector = self._vector(position)
            if position is not None:
                self._alive[position] = False
                self._num_alive -= 1
                if self._rows[position] != effect.row:
                    freed_rows.append(int(self._rows[position]))
            if effect.row is None:
                self._position_of.pop(effect.id, None)
            else:
                assert vector is not None
                self.append(effect.id, effect.row, vector, effect.metadata)
        return freed_rows

    def row_of(self, item_id: str) -> int:
        """Returns the ledger's row of an existing item."""
        return int(self._rows[self._position_of[item_id]])

    def _vector(self, position: int) -> Embeddings:
        num = len(self._generation.rows)
        vector: Embeddings = (
            self._generation.vectors[position]
            if position < num
            else self._delta[position - num].copy()
        )
        return vector

    def rows(self) -> NDArray[np.int64]:
        """Returns the ledger's rows of all items, ascending."""
        return np.sort(self._rows[: self._num][self._alive[: self._num]])

    def searcher(self) -> Searcher:
        """Returns the current state. It has a copy of `alive`, and shares the other buffers, which
        are only appended to.
        """
        return Searcher(
            generation=self._generation,
            delta=self._delta[: self._num - len(self._generation.rows)],
            alive=self._alive[: self._num].copy(),
            num_alive=self._num_alive,
            ids=self._ids,
            metadata=self._metadata,
            rows=self._rows[: self._num],
            position_of=self._position_of,
            columns=self._columns,
        )

    def take_over(self, before: Searcher, order: NDArray[np.int64]) -> None:
        """Copies the items at the positions `order` of `before`, all alive, as the items of this
        growth's generation, in this order.
        """
        num = len(order)
        self._ids = [before.ids[position] for position in order.tolist()]
        self._metadata = [before.metadata[position] for position in order.tolist()]
        self._alive[:num] = True
        self._num_alive = num
        self._position_of = {item_id: position for position, item_id in enumerate(self._ids)}
        self._columns = before.columns.take(order, before.num_positions)

    def catch_up(self, before: Searcher, now: Searcher) -> None:
        """Applies the changes from `before` to `now`, made while the generation was built from
        `before`.
        """
        num = before.num_positions
        for position in np.flatnonzero(before.alive & ~now.alive[:num]).tolist():
            self.kill(before.ids[position])
        added = np.flatnonzero(now.alive[num:]) + num
        for position, vector in zip(added.tolist(), now.vectors(added), strict=True):
            self.append(now.ids[position], int(now.rows[position]), vector, now.metadata[position])


def build_growth(
    folder: Path,
    before: Searcher,
    *,
    fingerprint: Fingerprint,
    target: float,
    parents: tuple[Parent, ...],
    advance: Callable[[int], None],
) -> Growth:
    """Builds a new generation of the index from all items of the state `before`, and returns a
    growth that continues it. Other arguments: see `write_generation`.
    """
    alive = np.flatnonzero(before.alive)
    order = alive[np.random.default_rng(before.generation.number).permutation(len(alive))]
    dimension = before.delta.shape[1]
    generation = write_generation(
        folder,
        before.generation.number + 1,
        rows=before.rows[order],
        blocks=(
            before.vectors(order[i : i + _COPIED_ROWS]) for i in range(0, len(order), _COPIED_ROWS)
        ),
        dimension=dimension,
        fingerprint=fingerprint,
        target=target,
        parents=parents,
        advance=advance,
    )
    growth = Growth(generation, dimension)
    growth.take_over(before, order)
    return growth
