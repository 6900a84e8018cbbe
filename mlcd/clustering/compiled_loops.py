"""Numba kernels of the compiled scan: they select entries from a block of products, and compute the
float64 scores of the selected entries.

This module is imported only if numba is installed; the labels are the same without it. Machine code
is cached beside this file or in the user's cache: it is compiled once per machine, and again after
this file changes, so no code from other files may be compiled into it. All loops release the GIL.
No loop assigns to a slice: compiling the error message for unequal lengths would take two seconds.

See `mlcd.clustering.compiled_scan`. Shapes: B rows of a batch, C centers of a block, K centers, D
dimension, M entries held, S best known, G groups.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numba
import numpy as np
from numpy.typing import NDArray

_Singles: TypeAlias = NDArray[np.float32]

_GROUP: Final = 16  # entries in a group; only the largest is compared first
_MIN_GROUPS_PER_RESULT: Final = 2  # groups are used from this many per requested center on
_HALVINGS: Final = 12  # bisection steps of the search for a threshold
CENTERS_PER_STEP: Final = 8  # multiplied by a row at once, so that their memory reads overlap
_MAX_UNORDERED: Final = 16  # of more held entries, the largest products are scored first
_MIN_SCALE: Final = np.float32(1e-30)  # as in `int8_matmul`
# held entries whose products lie in this upper share of their range are scored first
_FIRST_SHARE: Final = np.float32(0.1)
_NO_THRESHOLD: Final = np.float32(-np.inf)  # every entry exceeds it
_ABANDONED: Final = np.float32(np.inf)  # threshold that no entry exceeds

# numba options of every loop
_OPTIONS: Final = {"nogil": True, "error_model": "numpy", "_nrt": False}


class Query(NamedTuple):
    """The input of a scan. The score of a shifted center d, whose rounded copy is d', is bounded by
    its product a:

        a + error |d| + length |d - d'| + row_error + offset.

    rows: [B, D], and centers: [K, D], both float32. top: number of centers per row. max_scored: a
    row that has more scored centers after a block is abandoned. row_error, length, error, offset,
    max_error and summation_error: as in `mlcd.clustering.certificate.Slack`, [B]. center_lengths,
    center_errors: |d| and |d - d'|, [K]. margin: error of comparing bounds. All these are float64.
    """

    rows: NDArray[np.float32]
    centers: NDArray[np.float32]
    top: int
    max_scored: int
    row_error: NDArray[np.float64]
    length: NDArray[np.float64]
    error: NDArray[np.float64]
    offset: NDArray[np.float64]
    max_error: NDArray[np.float64]
    center_lengths: NDArray[np.float64]
    center_errors: NDArray[np.float64]
    margin: float
    summation_error: NDArray[np.float64]


class KeptEntries(NamedTuple):
    """The entries held for each row, and its best centers.

    ids, products: entries held until they are scored, [B, M]. num: number of held entries, [B].
    best_ids, best_scores: best scored centers, [B, S], padded with -1 and -inf. threshold: every
    product of the answer exceeds it, [B] float32; -inf until enough centers are scored, inf for an
    abandoned row. num_scored: number of scored centers, [B]. sure: whether no other center can be
    in the answer, [B]. order_independent: whether the order of the answer and its float32 scores
    are the same for every order of summation, [B]. waiting: buffer for centers scored at once, [8].
    maxima, columns: buffers for the maxima and the columns of a block, at least [C].
    """

    ids: NDArray[np.int32]
    products: NDArray[np.float32]
    num: NDArray[np.int64]
    best_ids: NDArray[np.int64]
    best_scores: NDArray[np.float64]
    threshold: NDArray[np.float32]
    num_scored: NDArray[np.int64]
    sure: NDArray[np.bool_]
    order_independent: NDArray[np.bool_]
    waiting: NDArray[np.int64]
    maxima: NDArray[np.float32]
    columns: NDArray[np.int64]


class Products(NamedTuple):
    """The products of a row: value times scale plus term, rounded to float32 after each of the two
    steps, so that a product is the same wherever it is computed.

    values: [at least C], terms: [C]. num_groups: G, of sixteen entries each; group g contains
    g, g + G, …; the last entries may be in no group.
    """

    values: NDArray[np.float32]
    scale: np.float32
    terms: NDArray[np.float32]
    num_groups: int


def _compiled(*may_assume: str) -> Callable[..., Any]:
    """Returns a decorator that compiles a function. may_assume: fastmath flags of LLVM."""
    return cast(Callable[..., Any], numba.njit(fastmath=set(may_assume), **_OPTIONS))


def _compiled_once(function: Callable[..., Any]) -> Any:
    """Compiles a function and caches its machine code for other processes.

    Its signature must not contain classes of this package: another version without the class could
    not read the cache.
    """
    try:
        return numba.njit(function, cache=True, **_OPTIONS)
    except RuntimeError:  # no folder is writable for the cache
        return numba.njit(function, **_OPTIONS)


def read_only(vectors: _Singles) -> _Singles:
    """Returns a read-only view: loops are compiled only for read-only vectors."""
    view = vectors.view()
    view.flags.writeable = False
    return view


@_compiled_once
def collect_candidates(
    sums: tuple[_Singles, _Singles, _Singles],
    start: int,
    num_left: int,
    query_fields: tuple[Any, ...],
    kept_fields: tuple[Any, ...],
) -> int:
    """Holds the entries of a block that may be in the answer; returns the number of abandoned rows.

    sums: values, scales and terms as in `mlcd.clustering.matmul.Sums`. start: first center of the
    block. num_left: number of centers in later blocks; after the last block, all entries that may
    be in the answer are scored. For a row without a threshold, the largest products are scored
    first: enough for an answer and few more.
    """
    query, entries = Query(*query_fields), KeptEntries(*kept_fields)
    values_BC, scales_B, terms_C = sums
    num = len(terms_C)
    num_groups = num // _GROUP if num >= _GROUP * _MIN_GROUPS_PER_RESULT * query.top else 0
    # maxima of the groups, then the entries outside of groups
    maxima = entries.maxima[: num - (_GROUP - 1) * num_groups]
    columns, num_abandoned = entries.columns, 0
    for row in range(len(values_BC)):
        if entries.threshold[row] == _ABANDONED:
            num_abandoned += 1
            continue
        products = Products(values_BC[row], scales_B[row], terms_C, num_groups)
        max_product = np.float32(np.inf)
        _write_maxima(products, maxima)
        if entries.threshold[row] == _NO_THRESHOLD:
            max_product = np.nextafter(_bisect_threshold(maxima, query.top), np.float32(-np.inf))
            num_found = _find_columns(products, maxima, max_product, np.float32(np.inf), columns)
            num_scored = _score_first(row, start, columns[:num_found], query, entries)
            _hold_entries(row, products, columns[num_scored:num_found], start, query, entries)
        num_found = _find_columns(products, maxima, entries.threshold[row], max_product, columns)
        _hold_entries(row, products, columns[:num_found], start, query, entries)
        if entries.num_scored[row] > query.max_scored:
            entries.threshold[row], entries.num[row] = _ABANDONED, 0
            num_abandoned += 1
        elif num_left == 0:
            _score_all(row, query, entries)
    return num_abandoned


@_compiled_once
def mark_sure_rows(query_fields: tuple[Any, ...], kept_fields: tuple[Any, ...]) -> None:
    """Sets `sure` and `order_independent` of each row, and removes the best centers of abandoned
    rows.
    """
    query, entries = Query(*query_fields), KeptEntries(*kept_fields)
    last = query.top - 1
    for row in range(len(entries.num)):
        scores, error = entries.best_scores[row], query.summation_error[row]
        if entries.threshold[row] == _ABANDONED:
            for place in range(len(scores)):
                entries.best_ids[row, place] = -1
        # a scored center outside of the list scores at most scores[-1]; bounds rule out the rest
        no_rival_left = scores[-1] < scores[last] - error
        entries.sure[row] = entries.best_ids[row, last] >= 0 and no_rival_left
        independent = entries.sure[row] and _is_order_independent(row, query, entries)
        entries.order_independent[row] = independent


@_compiled()
def _is_order_independent(row: int, query: Query, entries: KeptEntries) -> bool:
    ids, scores, error = entries.best_ids[row], entries.best_scores[row], query.summation_error[row]
    for place in range(query.top):
        score, following = scores[place], scores[place + 1]
        if np.float32(score - error) != np.float32(score + error):
            return False
        # equal centers have equal scores in any order of summation: their ids decide
        equal = score == following and _is_same(query.centers, ids[place], ids[place + 1])
        if score <= following + error and not equal:
            return False
    return True


@_compiled()
def _is_same(centers: _Singles, first: int, second: int) -> bool:
    for component in range(centers.shape[1]):
        if centers[first, component] != centers[second, component]:
            return False
    return True


def round_rows(rows_BD: _Singles, shift_D: _Singles, levels: int, rounded: Any) -> None:
    """Rounds rows like `mlcd.clustering.int8_matmul.round_in_numpy`, with the same arguments."""
    memory_4D = np.zeros((4, rows_BD.shape[1]), np.float32)
    _round_rows(read_only(rows_BD), shift_D, levels, memory_4D, tuple(rounded))


@_compiled_once
def _round_rows(
    rows_BD: _Singles,
    shift_D: _Singles,
    levels: int,
    memory_4D: _Singles,
    rounded_fields: tuple[Any, ...],
) -> None:
    """Rounds rows as above. memory_4D: zeros; buffers for a row, the absolute values of its
    components, zero terms and the maxima.
    """
    unsigned, scales, squares, squared_errors, offsets = rounded_fields
    dimension = rows_BD.shape[1]
    num_groups = dimension // _GROUP
    vector, sizes = memory_4D[0], Products(memory_4D[1], np.float32(1), memory_4D[2], num_groups)
    maxima = memory_4D[3, : dimension - (_GROUP - 1) * num_groups]
    for row in range(len(rows_BD)):
        for component in range(dimension):
            vector[component] = rows_BD[row, component] - shift_D[component]
            sizes.values[component] = abs(vector[component])
        _write_maxima(sizes, maxima)
        largest = np.float32(0)
        for value in maxima:
            largest = max(largest, value)
        scale = max(largest / np.float32(levels), _MIN_SCALE)
        scales[row] = scale
        squares[row], squared_errors[row] = _quantize(
            vector, scale, np.float32(levels + 1), unsigned[row]
        )
        offsets[row] = _inner_product(rows_BD[row], shift_D)


@_compiled()
def _product(products: Products, column: int) -> np.float32:
    product: np.float32 = products.values[column] * products.scale + products.terms[column]
    return product


@_compiled("nnan", "nsz")
def _write_maxima(products: Products, maxima: _Singles) -> None:
    """Writes the largest entry of each group, then the entries outside of groups. Maxima run along
    contiguous memory, four at a time.
    """
    num_groups = products.num_groups
    for group in range(num_groups):
        maxima[group] = _product(products, group)
    for first in range(0, _GROUP, 4):
        start = first * num_groups
        for group in range(num_groups):
            at = start + group
            two = max(_product(products, at), _product(products, at + num_groups))
            three = max(two, _product(products, at + 2 * num_groups))
            maxima[group] = max(maxima[group], three, _product(products, at + 3 * num_groups))
    for place in range(num_groups, len(maxima)):
        maxima[place] = _product(products, place + (_GROUP - 1) * num_groups)


@_compiled("reassoc", "contract")
def _quantize(
    vector: _Singles, scale: np.float32, zero_point: np.float32, unsigned: NDArray[np.uint8]
) -> tuple[np.float32, np.float32]:
    """Writes the quantized row; returns the sums of its squares and of the squared errors."""
    inverse = np.float32(1) / scale
    squares = squared_errors = np.float32(0)
    for component in range(len(vector)):
        number = np.rint(vector[component] * inverse)
        unsigned[component] = np.uint8(np.int32(number + zero_point))
        squares += number * number
        error = vector[component] - number * scale
        squared_errors += error * error
    return squares, squared_errors


@_compiled("reassoc", "contract")
def _inner_product(vector: _Singles, second_vector: _Singles) -> np.float32:
    total = np.float32(0)
    for component in range(len(vector)):
        total += vector[component] * second_vector[component]
    return total


@_compiled()
def _bisect_threshold(values: _Singles, num: int) -> np.float32:
    """Returns a threshold such that at least `num` of the values, and few more, are >= it; -inf if
    there are fewer than `num` values.
    """
    if len(values) < num:
        return np.float32(-np.inf)
    low: np.float32 = values[0]
    high = low
    for value in values:
        low, high = min(low, value), max(high, value)
    for _ in range(_HALVINGS):
        middle = low + (high - low) / np.float32(2)
        num_reaching = _count_reaching(values, middle)
        if num_reaching >= num:
            low = middle
        else:
            high = middle
        if num_reaching == num:
            break
    return low


@_compiled("reassoc")
def _count_reaching(values: _Singles, threshold: np.float32) -> np.float32:
    num = np.float32(0)  # a float, so that eight are counted at a time
    for at in range(len(values)):
        num += np.float32(values[at] >= threshold)
    return num


@_compiled()
def _find_columns(
    products: Products,
    maxima: _Singles,
    threshold: np.float32,
    max_product: np.float32,
    columns: NDArray[np.int64],
) -> int:
    """Writes the columns of the entries > threshold and <= max_product, and returns their number. A
    column is written before its comparison, which avoids a mispredicted branch.
    """
    num, num_groups = 0, products.num_groups
    for group in range(num_groups):
        if maxima[group] > threshold:
            for member in range(_GROUP):
                columns[num] = group + member * num_groups
                num += threshold < _product(products, columns[num]) <= max_product
    for column in range(_GROUP * num_groups, len(products.terms)):
        columns[num] = column
        num += threshold < _product(products, column) <= max_product
    return num


@_compiled()
def _hold_entries(
    row: int,
    products: Products,
    columns: NDArray[np.int64],
    start: int,
    query: Query,
    entries: KeptEntries,
) -> None:
    """Holds the entries of these columns."""
    num, threshold = entries.num[row], entries.threshold[row]
    for at in range(len(columns)):
        product = _product(products, columns[at])
        if product <= threshold:
            continue
        entries.ids[row, num], entries.products[row, num] = start + columns[at], product
        num += 1
        if num == entries.ids.shape[1]:
            entries.num[row] = num
            _make_room(row, query, entries)
            num, threshold = entries.num[row], entries.threshold[row]
    entries.num[row] = num


@_compiled()
def _score_first(
    row: int, start: int, columns: NDArray[np.int64], query: Query, entries: KeptEntries
) -> int:
    """Scores the centers of the first columns, eight at a time, until `top` are scored; returns
    the number of scored centers.
    """
    num, waiting = 0, entries.waiting
    while num < min(query.top, len(columns)):
        num_waiting = min(CENTERS_PER_STEP, len(columns) - num)
        for place in range(num_waiting):
            waiting[place] = start + columns[num + place]
        _score_some(row, waiting, num_waiting, query, entries)
        num += num_waiting
    return num


@_compiled()
def _score_all(row: int, query: Query, entries: KeptEntries) -> None:
    """Scores the held entries that may be in the answer."""
    if entries.num[row] > _MAX_UNORDERED:
        _score_top_share(row, _FIRST_SHARE, query, entries)
    _score(row, np.float32(-np.inf), query, entries)


@_compiled()
def _make_room(row: int, query: Query, entries: KeptEntries) -> None:
    """Scores the held entries with the largest products, until at most half of the room is used."""
    share = _FIRST_SHARE
    _score_top_share(row, share, query, entries)
    while entries.num[row] > entries.ids.shape[1] // 2:
        share *= 2
        _score_top_share(row, share, query, entries)


@_compiled()
def _score_top_share(row: int, share: np.float32, query: Query, entries: KeptEntries) -> None:
    """Scores the held entries whose products lie in the top `share` of their range."""
    lowest = largest = entries.products[row, 0]
    for place in range(entries.num[row]):
        largest = max(largest, entries.products[row, place])
        lowest = min(lowest, entries.products[row, place])
    _score(row, largest - share * (largest - lowest), query, entries)


@_compiled()
def _score(row: int, lowest: np.float32, query: Query, entries: KeptEntries) -> None:
    """Scores the held entries that may be in the answer and whose products reach `lowest`. Other
    entries that may be in the answer stay held.
    """
    ids, products, best_scores = entries.ids[row], entries.products[row], entries.best_scores[row]
    error, length, last = query.error[row], query.length[row], query.top - 1
    common = query.offset[row] + query.margin + query.row_error[row]
    num_left, num_waiting, waiting = 0, 0, entries.waiting
    for place in range(entries.num[row]):
        center, product = ids[place], products[place]
        upper = common + product
        upper += error * query.center_lengths[center] + length * query.center_errors[center]
        if product <= entries.threshold[row] or upper < best_scores[last]:
            continue
        if product < lowest:
            ids[num_left], products[num_left] = center, product
            num_left += 1
            continue
        waiting[num_waiting] = center
        num_waiting += 1
        if num_waiting == CENTERS_PER_STEP:
            _score_some(row, waiting, num_waiting, query, entries)
            num_waiting = 0
    if num_waiting:
        _score_some(row, waiting, num_waiting, query, entries)
    entries.num[row] = num_left


@_compiled()
def _score_some(
    row: int, ids: NDArray[np.int64], num: int, query: Query, entries: KeptEntries
) -> None:
    """Scores the first `num` of these centers, and raises the threshold."""
    best_ids, best_scores = entries.best_ids[row], entries.best_scores[row]
    for place in range(num, CENTERS_PER_STEP):  # padding by a center that is in the cache
        ids[place] = ids[0]
    _score_eight(
        query.rows[row], query.centers, ids, num, entries.num_scored[row], best_ids, best_scores
    )
    entries.num_scored[row] += num
    bound = best_scores[query.top - 1] - query.offset[row] - query.max_error[row] - 2 * query.margin
    # as in `mlcd.clustering.certificate.beyond_reach`
    threshold = np.nextafter(np.float32(bound), np.float32(-np.inf))
    entries.threshold[row] = max(entries.threshold[row], threshold)


@_compiled()
def _score_eight(
    vector: _Singles,
    centers: _Singles,
    ids: NDArray[np.int64],
    num: int,
    num_known: int,
    best_ids: NDArray[np.int64],
    best_scores: NDArray[np.float64],
) -> None:
    """Multiplies eight centers by a row, and inserts the first `num` among the best; the remaining
    centers are padding. num_known: number of centers inserted before.
    """
    scores = _products(
        vector,
        (
            centers[ids[0]],
            centers[ids[1]],
            centers[ids[2]],
            centers[ids[3]],
            centers[ids[4]],
            centers[ids[5]],
            centers[ids[6]],
            centers[ids[7]],
        ),
    )
    for place in range(num):
        _insert(best_ids, best_scores, num_known + place, ids[place], scores[place])


@_compiled()
def _insert(
    ids: NDArray[np.int64], scores: NDArray[np.float64], num: int, center: int, score: float
) -> None:
    """Inserts a center among the best, by score descending, then id ascending. num: number of
    centers inserted before.
    """
    at = min(num, len(ids) - 1)
    if num >= len(ids) and (score < scores[at] or (score == scores[at] and center > ids[at])):
        return
    while at > 0 and (scores[at - 1] < score or (scores[at - 1] == score and ids[at - 1] > center)):
        ids[at], scores[at] = ids[at - 1], scores[at - 1]
        at -= 1
    ids[at], scores[at] = center, score


@_compiled("reassoc", "contract")
def _products(vector: _Singles, centers: tuple[_Singles, ...]) -> tuple[float, ...]:
    """Returns the inner products with eight centers in float64, summed in any order."""
    one, two, three, four, five, six, seven, eight = centers
    with_1 = with_2 = with_3 = with_4 = with_5 = with_6 = with_7 = with_8 = 0.0
    for at in range(len(vector)):
        component = np.float64(vector[at])
        with_1 += component * np.float64(one[at])
        with_2 += component * np.float64(two[at])
        with_3 += component * np.float64(three[at])
        with_4 += component * np.float64(four[at])
        with_5 += component * np.float64(five[at])
        with_6 += component * np.float64(six[at])
        with_7 += component * np.float64(seven[at])
        with_8 += component * np.float64(eight[at])
    return with_1, with_2, with_3, with_4, with_5, with_6, with_7, with_8
