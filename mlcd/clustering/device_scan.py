"""Scans centers on a device: returns for each row a few centers that contain its answer.

The bounds are derived in `mlcd.clustering.nearest`. A device has memory for all products of a
batch, or for their maxima, so no threshold has to rise from block to block. All shapes are known in
advance, and results are read back only at the end: the host waits once per batch, the device never.

1. All products of a row are computed in bfloat16 and summed in float32. The maximum of each group
   of 16 centers and of each tile of 256 is kept. The l largest maxima belong to l centers, so they
   bound the l-th best score from below; maxima lower by more than twice the error are skipped.
2. The largest of the remaining tiles, then groups, are selected as far as `room` allows, and their
   members' products are computed again. The l largest of these bound the answer more closely.
3. The remaining centers are scored in float64. The shortlist has those that may be in the answer
   under any order of summation. It is the answer if neither its order nor its rounding to float32
   depends on the order of summation.

A row that exceeds `room` is not sure, and is scanned again with more room. Each batch has its own
stream, so that one batch is copied while another is multiplied.

Shapes: B rows of a batch, K centers, D dimension, L centers per answer.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, cast

import torch
from torch import Tensor

from mlcd.clustering.certificate import DOUBLE_MARGIN, Norms, Slack
from mlcd.clustering.device_products import GROUP, TILE, by_kernels, in_float64, maxima, of_members
from mlcd.clustering.matmul import Loaded, Rounding, mean_of
from mlcd.clustering.shortlist import Shortlist
from mlcd.errors import Unavailable
from mlcd.types import Embeddings

_ALIGNED: Final = 64  # components that a kernel loads at once
_BLOCK_CENTERS: Final = 1 << 16  # rounded at once
# Fewest tiles per center of the answer: with fewer, two of its centers often share a tile, and the
# maxima of other tiles give a loose bound.
_TILES_EACH: Final = 32
_MEMBERS_EACH: Final = 2  # members scored in float64 per group of room
_SPARED: Final = (
    8  # a shortlist has 1/8 of the room in extra entries, for ties with the last center
)
_MAXIMA: Final = 1 << 27  # maxima in memory per batch: 512 MiB
_MEMBERS: Final = 1 << 25  # products of members in memory: 384 MiB with their ids
_LEAST_ROWS, _MOST_ROWS = 128, 4096
_IN_FLIGHT: Final = 3  # concurrent batches, so that the device has work while the host waits
_SINGLE: Final = 2.0**-23  # tensor cores may truncate their float32 sums
_DOUBLE: Final = 2.0**-52


def cuda_available() -> bool:
    """Returns whether torch can use a GPU that multiplies bfloat16."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def on_gpu(centers_KD: Embeddings, device: str = "cuda") -> "DeviceScan":
    """Puts the centers on the GPU. Raises Unavailable if the GPU cannot take them."""
    try:
        return DeviceScan(centers_KD, device)
    except RuntimeError as error:
        reason = "do not fit" if isinstance(error, torch.cuda.OutOfMemoryError) else "cannot be put"
        raise Unavailable(
            f"{len(centers_KD)} centers {reason} on the GPU", remedy="take auto or numpy"
        ) from error


class DeviceScan:
    """The centers on a device: in float32, and less their mean in bfloat16."""

    rooms: Final = (8, 64)
    sums_in_order: Final = False

    def __init__(self, centers_KD: Embeddings, device: str = "cuda") -> None:
        _keep_float32_exact()
        self.name = f"bf16 {device}"
        by_kernels(torch.device(device))  # tries the kernels before threads use them
        self._device, self._num_centers = torch.device(device), len(centers_KD)
        shift_D = torch.from_numpy(mean_of(centers_KD)).to(self._device)
        num, dimension = centers_KD.shape
        self._centers_KD = torch.empty((num, dimension), device=self._device)
        padded = (_multiple(num, GROUP), _multiple(dimension, _ALIGNED))
        self._rounded_KD = torch.zeros(padded, dtype=torch.bfloat16, device=self._device)
        lengths_3K = torch.empty((3, num), dtype=torch.float64, device=self._device)
        for start in range(0, num, _BLOCK_CENTERS):
            block = slice(start, min(start + _BLOCK_CENTERS, num))
            self._centers_KD[block] = _tensor(centers_KD[block])
            rounded = self._rounded_KD[block, :dimension]
            rounded.copy_(self._centers_KD[block] - shift_D)
            exact = self._centers_KD[block].double() - shift_D.double()
            lengths_3K[:, block] = torch.stack(
                [_lengths(exact), _lengths(rounded.double()), _lengths(exact - rounded.double())]
            )
        # Copies of the last center pad its group: they do not change its maximum.
        self._rounded_KD[num:] = self._rounded_KD[num - 1 : num]
        self._all_rounded_KD = self._rounded_KD  # also those that `first` leaves out
        shift = float(shift_D.double().norm())
        self._norms = Norms.of_each(lengths_3K.cpu().numpy(), shift, dimension)
        self._rounding = Rounding(inputs=True, sum_roundoff=_SINGLE)
        self._streams: SimpleQueue[torch.cuda.Stream | None] = SimpleQueue()
        for _ in range(_IN_FLIGHT):
            on_gpu = self._device.type == "cuda"
            self._streams.put(torch.cuda.Stream(self._device) if on_gpu else None)

    @property
    def batch_rows(self) -> int:
        """Returns the maximum number of rows per batch."""
        rows = _MAXIMA // max(1, len(self._rounded_KD) // GROUP)
        return min(_MOST_ROWS, max(_LEAST_ROWS, rows))

    def shortlist(self, rows_BD: Embeddings, top: int, room: int) -> Shortlist:
        """Returns the centers that may be among the `top` of each row.

        room: number of tiles, and of groups, whose members are computed for each row. If the device
        runs out of memory, no row is sure.
        """
        num_rows = max(1, _MEMBERS // (room * GROUP))
        with suppress(torch.cuda.OutOfMemoryError), self._stream(), torch.inference_mode():
            parts = [
                self._shortlist(
                    _tensor(rows_BD[start : start + num_rows]).to(self._device), top, room
                )
                for start in range(0, len(rows_BD), num_rows)
            ]
            ids, scores, sure, clear = (
                torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True)
            )
            return Shortlist(ids, scores, sure, clear)
        torch.cuda.empty_cache()
        return Shortlist.of_none(len(rows_BD), top)

    def first(self, num: int) -> "DeviceScan":
        """Returns a scan of the first `num` centers, a multiple of GROUP, in the same memory."""
        scan = copy(self)
        scan._num_centers = num  # noqa: SLF001 - of this class
        scan._rounded_KD = self._rounded_KD[:num]  # noqa: SLF001 - of this class
        return scan

    def nearest(
        self, rows_BD: Tensor, top: int = 1, also_B: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the `top` nearest centers of each row of this device, int64 [B, top], best first,
        and the indices of the rows for which they are not proven. Needs inference mode.

        also: [B] int64, a center of each row beside those of `first`, for a `top` of 1.
        """
        ids_BL = torch.zeros((len(rows_BD), top), dtype=torch.int64, device=self._device)
        unproven = torch.arange(len(rows_BD), device=self._device)
        for room in self.rooms:
            open_parts = []
            for part in unproven.split(self.batch_rows):
                also = None if also_B is None else also_B[part]
                ids_BL[part], proven = self.propose(rows_BD[part], top, room, also)
                open_parts.append(part[~proven])
            unproven = torch.cat(open_parts)
            if not len(unproven):
                break
        return ids_BL, unproven

    def propose(
        self, rows_BD: Tensor, top: int, room: int, also_B: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the best `top` centers of each row among those that `room` per center of the
        answer leaves and `also`, int64 [B, top], and a mask of the rows for which they are proven.

        Reads nothing back, so that it can be recorded. Needs inference mode.
        """
        ids, _, _, clear = self._shortlist(rows_BD, top, room * top, also_B)
        return ids[:, :top], clear

    @contextmanager
    def _stream(self) -> Iterator[None]:
        """Takes an idle stream for a batch. The work that created the centers has finished."""
        stream = self._streams.get()
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            self._streams.put(stream)

    def _shortlist(
        self, exact_BD: Tensor, top: int, room: int, also_B: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        shape = (len(exact_BD), self._rounded_KD.shape[1])
        rows_BD = torch.zeros(shape, dtype=torch.bfloat16, device=self._device)
        rows_BD[:, : exact_BD.shape[1]] = exact_BD
        slack = self._slack(exact_BD, rows_BD[:, : exact_BD.shape[1]])
        # A row without a bound is left to the CPU; the device gets zeros, which cannot overflow.
        holds_B = cast(Tensor, slack.holds())
        rows_BD.masked_fill_(~holds_B[:, None], 0.0)
        slack_B = cast(Tensor, slack.max_error).masked_fill(~holds_B, 0.0)
        groups_BG, tiles_BT = maxima(rows_BD, self._rounded_KD)
        floor_B1 = torch.full_like(tiles_BT[:, :1], -torch.inf)
        if also_B is not None:
            also_BD = self._all_rounded_KD[also_B].float()
            floor_B1 = (rows_BD.float() * also_BD).sum(dim=1, keepdim=True)
        if tiles_BT.shape[1] >= _TILES_EACH * top:
            tiles = _Largest.of(tiles_BT, max(room, top))
            limit_B1 = _limit(torch.maximum(tiles.last(top), floor_B1), slack_B)
            within = torch.arange(TILE // GROUP, device=self._device)
            inside = (tiles.places[:, :, None] * (TILE // GROUP) + within).flatten(1)
            groups = _Largest.of(groups_BG.gather(1, inside), room)
            sure_B = tiles.complete(limit_B1) & groups.complete(limit_B1)
            places = inside.gather(1, groups.places)
        else:
            groups = _Largest.of(groups_BG, max(room, top))
            limit_B1 = _limit(torch.maximum(groups.last(top), floor_B1), slack_B)
            sure_B, places = groups.complete(limit_B1), groups.places
        absent = places >= len(self._rounded_KD) // GROUP
        chosen = places.masked_fill_(absent | (groups.values <= limit_B1), -1)
        products = of_members(rows_BD, self._rounded_KD, chosen)
        within = torch.arange(GROUP, device=self._device)
        members = (chosen[:, :, None] * GROUP + within).flatten(1)
        products.masked_fill_(members >= self._num_centers, -torch.inf)
        nearest = _Largest.of(products, max(_MEMBERS_EACH * room, top))
        limit_B1 = torch.maximum(limit_B1, _limit(nearest.last(top), slack_B))
        sure_B &= nearest.complete(limit_B1)
        ids = members.gather(1, nearest.places)
        ids.masked_fill_((ids >= self._num_centers) | (nearest.values <= limit_B1), -1)
        if also_B is not None:
            ids = torch.cat([ids, also_B[:, None]], dim=1)
        scores = in_float64(exact_BD, self._centers_KD, ids)
        best = _Largest.of(scores, top + room // _SPARED)
        apart_B1 = cast(Tensor, slack.summation_error())[:, None]
        least_B1 = best.last(top) - apart_B1
        sure_B &= best.complete(torch.nextafter(least_B1, least_B1 - 1))
        sure_B &= holds_B
        clear_B = sure_B & best.in_order(top, apart_B1) & best.rounded_alike(top, apart_B1)
        ids = ids.gather(1, best.places).masked_fill_(best.values < least_B1, -1)
        return ids, best.values, sure_B, clear_B

    def _slack(self, exact_BD: Tensor, rounded_BD: Tensor) -> Slack:
        """Returns the bounds of the rows' errors; its arrays are tensors of the device."""
        wide, rounded = exact_BD.double(), rounded_BD.double()
        length_B, error_B = _lengths(rounded), _lengths(wide - rounded)
        loaded = Loaded(rounded_BD, *cast(Any, (length_B, error_B, torch.zeros_like(length_B))))
        return Slack.of(loaded, self._rounding, self._norms)


@dataclass(frozen=True)
class _Largest:
    """The largest of each row's values, in descending order, [B, n], and their columns.

    all: whether these are all values.
    """

    values: Tensor
    places: Tensor
    all: bool

    @classmethod
    def of(cls, values_BN: Tensor, num: int) -> "_Largest":
        num = min(num, values_BN.shape[1])
        return cls(*values_BN.topk(num, dim=1), all=num == values_BN.shape[1])

    def last(self, top: int) -> Tensor:
        """Returns the `top`-th largest value of each row, [B, 1]; -inf if there are fewer."""
        if top > self.values.shape[1]:
            return torch.full_like(self.values[:, :1], -torch.inf)
        return self.values[:, top - 1 : top]

    def in_order(self, top: int, apart_B1: Tensor) -> Tensor:
        """Returns a mask [B] of the rows whose first `top` + 1 values differ by more than
        `apart_B1`.
        """
        first = self.values[:, : top + 1]
        return (first[:, :-1] - first[:, 1:] > apart_B1).all(dim=1)

    def rounded_alike(self, top: int, apart_B1: Tensor) -> Tensor:
        """Returns a mask [B] of the rows whose first values round alike in float32 if moved."""
        first = self.values[:, :top]
        # zero has two signs
        alike = ((first - apart_B1).float() == (first + apart_B1).float()) & (first != 0)
        return alike.all(dim=1)

    def complete(self, limit_B1: Tensor) -> Tensor:
        """Returns a mask [B] of the rows whose values above the limit are all among these."""
        if self.all:
            return torch.ones(len(self.values), dtype=torch.bool, device=self.values.device)
        return self.values[:, -1] <= limit_B1[:, 0]


def _limit(reached_B1: Tensor, slack_B: Tensor) -> Tensor:
    """Returns a limit, float32 [B, 1]: centers with products not above it are farther than centers
    whose products reach `reached_B1`. The same as `certificate.beyond_reach`, on the device.
    """
    bound_B1 = reached_B1.double() - 2 * slack_B[:, None] - 2 * DOUBLE_MARGIN
    limit_B1 = bound_B1.float()
    return torch.nextafter(limit_B1, torch.full_like(limit_B1, -torch.inf))


def _tensor(rows_BD: Embeddings) -> Tensor:
    """Returns the rows as a tensor; copies read-only arrays, about which torch would warn."""
    return torch.from_numpy(rows_BD) if rows_BD.flags.writeable else torch.tensor(rows_BD)


def _lengths(rows_BD: Tensor) -> Tensor:
    """Returns an upper bound of the length of each float64 row, [B]."""
    bound: Tensor = rows_BD.square().sum(dim=1).sqrt() * (1 + rows_BD.shape[1] * _DOUBLE)
    return bound


def _keep_float32_exact() -> None:
    """Forbids reduced-precision float32 sums, for which the error bounds are not valid."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.set_float32_matmul_precision("highest")


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of
