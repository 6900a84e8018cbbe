from concurrent.futures import ThreadPoolExecutor
from pickle import UnpicklingError

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcd.clustering import certified_scan, compiled_scan, nearest, row_threads
from mlcd.clustering.certificate import Slack
from mlcd.clustering.compiled_loops import KeptEntries
from mlcd.clustering.compiled_scan import CompiledScan
from mlcd.clustering.device_scan import DeviceScan
from mlcd.clustering.nearest import CenterScan
from mlcd.errors import ConfigInvalid
from mlcd.types import unit_rows

pytestmark = pytest.mark.plain_cpu

ARITHMETICS = ["numpy", "torch-int8"]


def drawn(num, dimension, seed, power=1.0):
    weights = (1.0 + np.arange(dimension)) ** -power
    return unit_rows(np.random.default_rng(seed).standard_normal((num, dimension)) * weights)


def a_family(num):
    """Centers that eight bits hardly tell apart."""
    return unit_rows(drawn(1, 128, 7, 0.0) + 1e-3 * drawn(num, 128, 8, 0.0))


def compiled(centers, matmul="numpy"):
    scan = CenterScan(centers, matmul=matmul)
    scan._way = nearest._Way(scan._way.scan, CompiledScan(scan._way.scan))
    return scan


def in_blocks_of(num, patched):
    for module in (certified_scan, compiled_scan):
        patched.setattr(module, "BLOCK_CENTERS", num)


@pytest.fixture
def soon(monkeypatch):
    """Lets a scan turn to the fastest way at once."""
    for name in ("WORTH_TORCH", "WORTH_COMPILING"):
        monkeypatch.setattr(nearest, name, 0)


def cases():
    families = np.repeat(drawn(40, 96, 2), 16, axis=0)
    jittered = unit_rows(families + 0.1 * drawn(640, 96, 3))
    yield "decaying", drawn(200, 96, 0), drawn(700, 96, 1)
    yield "flat", drawn(200, 96, 0, 0.0), drawn(700, 96, 1, 0.0)
    yield "families", drawn(200, 96, 4), jittered
    yield "rows that are centers", jittered[:200], jittered
    yield "equal centers", drawn(200, 96, 4), families
    yield "nearly equal", drawn(200, 96, 4), unit_rows(families + 1e-7 * drawn(640, 96, 5))
    cone = 30 * np.eye(96)[:1]
    yield "in a cone", unit_rows(drawn(200, 96, 0) + cone), unit_rows(drawn(700, 96, 1) + cone)
    lengths = np.geomspace(1e-3, 1e3, 200, dtype=np.float32)[:, None]
    yield "of any length", lengths * drawn(200, 96, 0), 7 * drawn(700, 96, 1)
    yield "zero rows", 0 * drawn(50, 96, 0), drawn(700, 96, 1)
    yield "one center", drawn(50, 96, 0), drawn(1, 96, 1)


@pytest.mark.parametrize("matmul", ARITHMETICS)
@pytest.mark.parametrize("block", [128, 4096])
@pytest.mark.parametrize(
    ("rows", "centers"), [pytest.param(*case[1:], id=case[0]) for case in cases()]
)
def test_the_answer_is_that_of_the_plain_scan(rows, centers, block, matmul, monkeypatch):
    in_blocks_of(block, monkeypatch)
    scan, plain = compiled(centers, matmul), CenterScan(centers, matmul="numpy")
    for top in (1, 8):
        for threshold in (None, 0.3):
            expected = plain.nearest(rows, top, threshold)
            found = scan.nearest(rows, top, threshold)
            assert (found.ids == expected.ids).all()
            assert (found.scores == expected.scores).all()


def test_equal_centers_are_in_a_clear_order_and_centers_of_equal_score_are_not():
    centers = np.repeat(drawn(20, 96, 1), 2, axis=0)
    row = np.eye(96, dtype=np.float32)[:1]
    mirrored = centers[::2] * (2 * row - 1)
    for others, clear in ((centers[1::2], True), (mirrored, False)):
        centers[1::2] = others
        found = CompiledScan(CenterScan(centers, matmul="numpy")._way.scan).shortlist(row, 8, 512)
        exact = centers[:, 0].astype(np.float64)
        assert found.ids[0, :8].tolist() == np.argsort(-exact, kind="stable")[:8].tolist()
        assert (found.sure.all(), found.clear.all()) == (True, clear)


def of_any_kind(random, num, dimension):
    vectors = random.standard_normal((num, dimension)) * (1.0 + np.arange(dimension)) ** -1.0
    kind = random.integers(6)
    if kind == 0:  # many ties
        vectors = random.integers(-2, 3, (num, dimension))
    elif kind == 1:  # rows of very different lengths, some of them zero
        vectors *= 10.0 ** random.uniform(-20, 15, (num, 1)) * (random.random((num, 1)) < 0.7)
    elif kind == 2:  # a narrow cone
        vectors += 1e3 * random.standard_normal((1, dimension))
    elif kind == 3:  # nearly equal
        vectors = random.standard_normal((1, dimension)) + 1e-7 * vectors
    elif kind == 4:  # below what float32 can square
        vectors *= 10.0 ** random.choice([-40, -25, -19])
    return vectors.astype(np.float32)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    dimension=st.sampled_from([1, 2, 3, 16, 96]),
    num=st.integers(1, 700),
    top=st.integers(1, 12),
    room=st.sampled_from([1, 4, 512]),
    held=st.sampled_from([2, 64]),
    matmul=st.sampled_from(ARITHMETICS),
)
def test_the_answer_of_any_vectors_is_that_of_the_plain_scan(
    seed, dimension, num, top, room, held, matmul
):
    random = np.random.default_rng(seed)
    rows, centers = of_any_kind(random, 30, dimension), of_any_kind(random, num, dimension)
    if random.random() < 0.3:
        rows = centers[random.integers(0, num, 30)]
    with pytest.MonkeyPatch.context() as patched, np.errstate(over="ignore", invalid="ignore"):
        in_blocks_of(64, patched)
        patched.setattr(CompiledScan, "rooms", (room,))
        patched.setattr(compiled_scan, "_LEAST_HELD", held)
        expected = CenterScan(centers, matmul="numpy").nearest(rows, top)
        found = compiled(centers, matmul).nearest(rows, top)
    assert (found.ids == expected.ids).all()
    assert (found.scores == expected.scores).all()


def test_where_too_many_remain_the_plain_scan_settles_the_rows(monkeypatch):
    monkeypatch.setattr(CompiledScan, "rooms", (1,))
    monkeypatch.setattr(certified_scan.CertifiedScan, "batch_rows", 64)
    monkeypatch.setattr(CompiledScan, "batch_rows", 64)
    monkeypatch.setattr(row_threads, "allowed_threads", lambda: 1)
    centers = a_family(3000)
    rows = unit_rows(centers[:200] + 0.1 * drawn(200, 128, 0, 0.0))
    scan, asked = compiled(centers, "torch-int8"), []
    shortlist = CompiledScan.shortlist
    monkeypatch.setattr(
        CompiledScan, "shortlist", lambda *args: asked.append(1) or shortlist(*args)
    )
    found = scan.nearest(rows, 8)
    assert (found.ids == CenterScan(centers, matmul="numpy").nearest(rows, 8).ids).all()
    assert found.scan.proven == 0
    assert len(asked) < 4  # batches: the next ones begin with the plain scan


@pytest.mark.parametrize("block", [256, 4096])
def test_single_rows_near_which_too_many_remain_are_left(block, monkeypatch):
    in_blocks_of(block, monkeypatch)
    monkeypatch.setattr(CompiledScan, "rooms", (6,))
    centers = np.concatenate([drawn(3000, 128, 1, 0.0), a_family(200)])
    rows = np.concatenate([drawn(200, 128, 0, 0.0), centers[-20:]])
    found = compiled(centers, "torch-int8").nearest(rows, 8)
    expected = CenterScan(centers, matmul="numpy").nearest(rows, 8)
    assert (found.ids == expected.ids).all()
    assert (found.scores == expected.scores).all()
    assert found.scan.proven >= 200
    assert found.scan.wider + found.scan.float32 > 0


@pytest.mark.parametrize("size", [1e-30, 1e19, 2e19, 4e19, 1e20, 1e30])
def test_products_that_float32_cannot_hold_are_left_to_the_plain_scan(size):
    rows, centers = drawn(64, 96, 0) * np.float32(size), drawn(700, 96, 1) * np.float32(size)
    with np.errstate(over="ignore", invalid="ignore"):
        found = compiled(centers).nearest(rows, 8)
    exact = rows.astype(np.float64) @ centers.astype(np.float64).T
    assert (found.ids == np.argsort(-exact, axis=1, kind="stable")[:, :8]).all()


@pytest.mark.parametrize(
    ("without_import", "with_import", "ways"),
    [
        (["numpy"], ["numpy"], ["numpy fp32", "numpy fp32", "numpy fp32, compiled"]),
        (
            ["numpy"],  # torch is not imported for so few centers
            ["torch-int8", "numpy"],
            ["numpy fp32", "numpy fp32", "torch int8 cpu, compiled"],
        ),
        (
            ["torch-int8", "numpy"],
            ["torch-int8", "numpy"],
            ["numpy fp32", "torch int8 cpu", "torch int8 cpu, compiled"],
        ),
    ],
)
def test_loops_over_the_fastest_products_are_compiled_once_there_is_work_for_it(
    without_import, with_import, ways, monkeypatch
):
    def fastest_matmuls(_, *, import_torch=None):
        return with_import if import_torch else without_import

    rows, centers = drawn(512, 128, 0), drawn(600, 128, 1)
    monkeypatch.setattr(nearest, "fastest_matmuls", fastest_matmuls)
    monkeypatch.setattr(nearest, "WORTH_TORCH", 2 * 512 * centers.size)
    monkeypatch.setattr(nearest, "WORTH_COMPILING", 3 * 512 * centers.size)
    scan = CenterScan(centers)
    found = [scan.nearest(rows, 8) for _ in range(4)]
    assert [each.scan.products for each in found] == [*ways, ways[-1]]
    for each in found[1:]:
        assert (each.ids == found[0].ids).all()
        assert (each.scores == found[0].scores).all()


def test_a_gpu_needs_no_loops(soon, monkeypatch):
    rows, centers = drawn(512, 128, 0), drawn(600, 128, 1)
    monkeypatch.setattr(nearest, "fastest_matmuls", lambda *_, **__: ["cuda-bf16", "numpy"])
    monkeypatch.setattr(nearest, "open_device", lambda centers: DeviceScan(centers, "cpu"))
    monkeypatch.setattr(compiled_scan, "CompiledScan", None)
    scan = CenterScan(centers)
    found = [scan.nearest(rows, 8) for _ in range(2)]
    assert [each.scan.products for each in found] == ["bf16 cpu"] * 2


def test_one_thread_opens_a_way_and_others_go_on(soon, monkeypatch):
    rows, centers = drawn(512, 128, 0), drawn(600, 128, 1)
    scan, opened, meanwhile = CenterScan(centers), [], []

    def slowly(way):
        opened.append(way)
        with ThreadPoolExecutor(1) as other:
            meanwhile.append(other.submit(scan.nearest, rows, 8).result().scan.products)
        return way

    monkeypatch.setattr(nearest, "fastest_matmuls", lambda *_, **__: ["numpy"])
    monkeypatch.setattr(scan, "_in_loops", slowly)
    scan.nearest(rows, 8)
    assert len(opened) == 1
    assert meanwhile == ["numpy fp32"]


@pytest.mark.parametrize("error", [ImportError, MemoryError, OSError, UnpicklingError])
@pytest.mark.parametrize("of", ["CompiledScan", "collect_candidates", "mark_sure_rows"])
def test_loops_that_fail_are_done_without_and_said(of, error, soon, monkeypatch, caplog):
    def failing(*_):
        raise error("out of order")

    monkeypatch.setattr(compiled_scan, of, failing)
    assert_plain(CenterScan(drawn(600, 128, 1, 2.0)))
    assert "the scan continues without compiled loops" in caplog.text
    assert f"{error.__name__}('out of order')" in caplog.text


def test_without_numba_the_scan_stays_plain(soon, monkeypatch):
    monkeypatch.setattr(nearest, "find_spec", lambda _: None)
    assert_plain(CenterScan(drawn(600, 128, 1, 2.0)))


def assert_plain(scan):
    rows = drawn(512, 128, 0, 2.0)
    expected = CenterScan(scan.centers, matmul="numpy").nearest(rows, 8)
    for _ in range(3):
        assert (scan.nearest(rows, 8).ids == expected.ids).all()
    assert scan._way.lister is None


def test_an_answer_names_the_way_that_found_it(monkeypatch):
    """Another thread may turn to a faster one meanwhile."""
    rows, centers = drawn(50, 128, 0), drawn(600, 128, 1)
    scan, chosen = CenterScan(centers, matmul="numpy"), CenterScan(centers, matmul="torch-int8")
    search = scan._search

    def interrupted(*args, **how):
        scan._way = chosen._way
        return search(*args, **how)

    monkeypatch.setattr(scan, "_search", interrupted)
    assert scan.nearest(rows, 8).scan.products == "numpy fp32"
    assert scan.nearest(rows, 8).scan.products == "torch int8 cpu"


def middle_of_two_float32():
    """Scores that lie on the middle of two float32 numbers, and next to it."""
    rows = np.ones((3, 2), dtype=np.float32)
    halves = np.float32(2.0**-24) * np.array([1, 1 + 2.0**-20, 1 - 2.0**-20], dtype=np.float32)
    return rows, np.stack([np.ones(3, dtype=np.float32), halves], axis=1)


def near_ties():
    centers = np.repeat(drawn(1, 64, 0), 30, axis=0)
    centers[np.arange(30), np.arange(30)] += np.float32(1e-7)
    return drawn(10, 64, 1), centers


def equal_centers():
    return drawn(10, 64, 1), np.repeat(drawn(5, 64, 0), 4, axis=0)


def tie_for_the_last_place():
    row, other = drawn(2, 64, 0)
    return row[None], np.stack([other, row, other])


@pytest.mark.parametrize(
    "of", [middle_of_two_float32, near_ties, equal_centers, tie_for_the_last_place]
)
@pytest.mark.parametrize("seed", range(5))
def test_no_order_of_summation_changes_an_answer(of, seed, monkeypatch):
    rows, centers = of()
    expected = CenterScan(centers, matmul="numpy").nearest(rows, 2)
    scan, random = compiled(centers), np.random.default_rng(seed)
    whole = scan._way.scan
    order_B = Slack.of(
        whole.matmul.load(rows), whole.matmul.rounding, whole.norms
    ).summation_error()

    def elsewhere(query, kept_fields):
        """The scores of another order of summation, as far away as one may be."""
        kept = KeptEntries(*kept_fields)
        kept.best_scores[:] += random.uniform(-0.5, 0.5, kept.best_ids.shape) * order_B[:, None]
        order = np.lexsort((kept.best_ids, -kept.best_scores), axis=1)
        for known in (kept.best_ids, kept.best_scores):
            known[:] = np.take_along_axis(known, order, axis=1)
        mark_sure_rows(query, kept_fields)

    mark_sure_rows = compiled_scan.mark_sure_rows
    monkeypatch.setattr(compiled_scan, "mark_sure_rows", elsewhere)
    found = scan.nearest(rows, 2)
    assert (found.ids == expected.ids).all()
    assert (found.scores == expected.scores).all()


def test_more_ties_than_are_known_are_left_to_the_plain_scan():
    row, other = drawn(2, 64, 0)
    centers = np.stack([other] * 5 + [row] * 40)
    found = compiled(centers).nearest(np.stack([row, other]), 8)
    assert found.ids.tolist() == [list(range(5, 13)), [*range(5), 5, 6, 7]]
    assert found.scan.proven == 0


def test_few_centers_are_scored_that_bounds_rule_out(monkeypatch):
    rows, centers = drawn(300, 128, 0), drawn(3000, 128, 1)
    scan, scored = compiled(centers, "torch-int8"), []
    mark_sure_rows = compiled_scan.mark_sure_rows

    def counted(query, kept_fields):
        scored.append(KeptEntries(*kept_fields).num_scored.sum())
        mark_sure_rows(query, kept_fields)

    monkeypatch.setattr(compiled_scan, "mark_sure_rows", counted)
    assert scan.nearest(rows, 8).scan.proven == 300
    last_B1 = np.partition(rows.astype(np.float64) @ centers.T, -8, axis=1)[:, -8, None]
    matmul, norms = scan._way.scan.matmul, scan._way.scan.norms
    loaded = matmul.load(rows)
    slack = Slack.of(loaded, matmul.rounding, norms)
    bounds = matmul.sums(loaded.data, 0, 3000).products()
    bounds = bounds + slack.of_pairs(*np.divmod(np.arange(bounds.size), 3000)).reshape(300, 3000)
    able = bounds + slack.offset[:, None] >= last_B1
    assert able.sum() <= sum(scored) < 1.5 * able.sum()


def test_zeros_have_one_sign():
    weights = drawn(30, 8, 0)
    rows = np.concatenate([weights, weights], axis=1) * np.float32(1e-25)
    centers = np.concatenate([weights, -weights], axis=1) * np.float32(1e-25)
    for scan in (compiled(centers), CenterScan(centers, matmul="numpy")):
        scores = scan.nearest(rows, 8).scores
        assert (scores == 0).any()
        assert not np.signbit(scores[scores == 0]).any()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_shift_whose_products_float32_cannot_hold_proves_nothing(sign):
    steps = np.arange(-8, 9, dtype=np.float32)[:, None] * np.float32(2.0**47)
    centers = np.float32(2.0**65) + steps * np.ones(4, dtype=np.float32)
    rows = np.float32(sign * 2.0**65) + steps[:6] * np.ones(4, dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = CenterScan(centers, matmul="numpy").nearest(rows, 4)
        for scan in (CenterScan(centers, matmul="torch-int8"), compiled(centers, "torch-int8")):
            assert (scan.nearest(rows, 4).ids == expected.ids).all()


def test_sums_of_eight_bits_that_float32_cannot_hold_prove_nothing():
    centers = drawn(300, 64, 0, 0.0) * np.float32(2.0**118)
    rows = drawn(20, 64, 1, 0.0) * np.float32(2.0**-3)
    expected = CenterScan(centers, matmul="numpy").nearest(rows, 70)
    with np.errstate(over="ignore", invalid="ignore"):
        for scan in (
            CenterScan(centers, matmul="torch-int8"),
            compiled(centers, "torch-int8"),
        ):
            found = scan.nearest(rows, 70)
            assert (found.ids == expected.ids).all()
            assert found.scan.proven == 0


def test_eight_bits_have_room_for_so_many_components_alone(soon):
    with pytest.raises(ConfigInvalid, match="requires at most 32768 components, got 32769"):
        CenterScan(drawn(2, 32_769, 0), matmul="torch-int8")
    scan = CenterScan(drawn(300, 32_769, 0))
    scan.nearest(np.ascontiguousarray(scan.centers[:256]), 2)
    assert "int8" not in scan.products
