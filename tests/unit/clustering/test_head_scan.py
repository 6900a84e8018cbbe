from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcd.clustering import head_choice, head_scan, heads, nearest, row_threads
from mlcd.clustering.head_choice import promising_components
from mlcd.clustering.head_scan import HeadScan
from mlcd.clustering.heads import Basis
from mlcd.clustering.nearest import CenterScan
from mlcd.types import unit_rows

pytestmark = pytest.mark.plain_cpu

ARITHMETICS = ["numpy", "torch-fp32", "torch-bf16", "torch-int8"]


def drawn(num, dimension, seed, power=1.0):
    weights = (1.0 + np.arange(dimension)) ** -power
    return unit_rows(np.random.default_rng(seed).standard_normal((num, dimension)) * weights)


def with_heads(centers, num, matmul="numpy"):
    scan = CenterScan(centers, matmul=matmul)
    heads = HeadScan(scan._way.scan, Basis(scan.centers), num)
    scan._way = nearest._Way(scan._way.scan, heads)
    return scan


@pytest.fixture
def soon(monkeypatch):
    """Lets a scan choose its way at once."""
    for name in ("_WORTH_A_TIMING", "_WORTH_HEADS", "_HEADS_EACH", "_BASIS_EACH"):
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
def test_the_answer_is_that_of_whole_products(rows, centers, block, matmul, monkeypatch):
    monkeypatch.setattr(head_scan, "BLOCK_CENTERS", block)
    scan, plain = with_heads(centers, 24, matmul), CenterScan(centers, matmul="numpy")
    for top in (1, 8):
        for threshold in (None, 0.3):
            expected = plain.nearest(rows, top, threshold)
            found = scan.nearest(rows, top, threshold)
            assert (found.ids == expected.ids).all()
            assert (found.scores == expected.scores).all()


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
    matmul=st.sampled_from(ARITHMETICS),
)
def test_the_answer_of_any_vectors_is_that_of_whole_products(
    seed, dimension, num, top, room, matmul
):
    random = np.random.default_rng(seed)
    rows, centers = of_any_kind(random, 30, dimension), of_any_kind(random, num, dimension)
    if random.random() < 0.3:
        rows = centers[random.integers(0, num, 30)]
    with pytest.MonkeyPatch.context() as patched, np.errstate(over="ignore", invalid="ignore"):
        patched.setattr(head_scan, "BLOCK_CENTERS", 64)
        patched.setattr(HeadScan, "rooms", (room,))
        expected = CenterScan(centers, matmul="numpy").nearest(rows, top)
        found = with_heads(centers, random.integers(1, dimension + 1), matmul).nearest(rows, top)
    assert (found.ids == expected.ids).all()
    assert (found.scores == expected.scores).all()


@pytest.mark.parametrize("matmul", ARITHMETICS)
def test_heads_settle_the_rows_where_few_directions_hold_most(matmul, monkeypatch):
    monkeypatch.setattr(head_scan, "BLOCK_CENTERS", 512)
    rows, centers = drawn(300, 128, 0), drawn(3000, 128, 1)
    found = with_heads(centers, 48, matmul).nearest(rows, 8)
    exact = rows.astype(np.float64) @ centers.astype(np.float64).T
    assert (found.ids == np.argsort(-exact, axis=1, kind="stable")[:, :8]).all()
    assert found.scan.proven == 300
    assert found.scan.products.endswith("heads of 48")


def test_where_heads_rule_little_out_whole_products_settle_the_rows(monkeypatch):
    monkeypatch.setattr(HeadScan, "rooms", (8,))
    monkeypatch.setattr(nearest, "_BATCH_ROWS", 64)
    monkeypatch.setattr(HeadScan, "batch_rows", 64)
    monkeypatch.setattr(row_threads, "allowed_threads", lambda: 1)
    rows, centers = drawn(200, 128, 0, 0.0), drawn(3000, 128, 1, 0.0)
    scan, asked = with_heads(centers, 16, "torch-int8"), []
    shortlist = HeadScan.shortlist
    monkeypatch.setattr(HeadScan, "shortlist", lambda *args: asked.append(1) or shortlist(*args))
    found = scan.nearest(rows, 8)
    assert (found.ids == CenterScan(centers, matmul="numpy").nearest(rows, 8).ids).all()
    assert found.scan.proven == 0
    assert len(asked) < 4  # batches: the next ones begin with whole products


@pytest.mark.parametrize("block", [256, 4096])
def test_single_rows_near_which_too_many_remain_are_left(block, monkeypatch):
    monkeypatch.setattr(head_scan, "BLOCK_CENTERS", block)
    monkeypatch.setattr(HeadScan, "rooms", (6,))
    centers = drawn(3000, 128, 1, 2.0)
    rows = np.concatenate([drawn(200, 128, 0, 2.0), drawn(20, 128, 0, 0.0)])
    found = with_heads(centers, 8).nearest(rows, 8)
    expected = CenterScan(centers, matmul="numpy").nearest(rows, 8)
    assert (found.ids == expected.ids).all()
    assert (found.scores == expected.scores).all()
    assert 0 < found.scan.float32 < 100


@pytest.mark.parametrize("size", [1e-30, 1e19, 2e19, 4e19, 1e20, 1e30])
def test_products_that_float32_cannot_hold_are_left_to_whole_vectors(size):
    rows, centers = drawn(64, 96, 0) * np.float32(size), drawn(700, 96, 1) * np.float32(size)
    with np.errstate(over="ignore", invalid="ignore"):
        found = with_heads(centers, 24).nearest(rows, 8)
    exact = rows.astype(np.float64) @ centers.astype(np.float64).T
    assert (found.ids == np.argsort(-exact, axis=1, kind="stable")[:, :8]).all()


@pytest.mark.parametrize(("most", "num_raised"), [(1, 25), (1 << 20, 6)])
def test_pairs_wait_until_they_are_many_or_the_blocks_seen_twice_as_many(
    most, num_raised, monkeypatch
):
    monkeypatch.setattr(head_scan, "BLOCK_CENTERS", 128)
    monkeypatch.setattr(head_scan, "_MOST_WAITING", most)
    raised, search = [], head_scan._Search
    once = search._raise
    monkeypatch.setattr(search, "_raise", lambda self: raised.append(1) or once(self))
    rows, centers = drawn(100, 96, 0), drawn(3000, 96, 1)
    found = with_heads(centers, 24).nearest(rows, 8)
    assert (found.ids == CenterScan(centers, matmul="numpy").nearest(rows, 8).ids).all()
    assert len(raised) == num_raised


@pytest.mark.parametrize("num", [1, 5, 128, 129, 1000])
def test_the_first_block_is_a_sample_of_all(num, monkeypatch):
    monkeypatch.setattr(head_scan, "BLOCK_CENTERS", 128)
    order = head_scan._sample_first(num)
    assert sorted(order) == list(range(num))
    assert len(set(np.diff(order[: min(num, 128)]))) <= 1
    assert order[: min(num, 128)].max() >= 0.8 * num - 1


def test_heads_are_promised_where_few_directions_hold_most_and_only_there():
    for power, few in ((2.0, True), (0.0, False)):
        rows, centers = drawn(256, 128, 0, power), drawn(5000, 128, 1, power)
        scores = CenterScan(centers, matmul="numpy").search(rows, 8)[1]
        num = promising_components(Basis(centers), centers, rows, scores)
        assert (num is not None) is few
        assert num is None or num <= 64


@pytest.mark.parametrize("power", [0.0, 2.0])
def test_heads_are_timed_once_there_is_work_for_it(power, soon, monkeypatch):
    rows, centers = drawn(512, 128, 0, power), drawn(6000, 128, 1, power)
    scan, timed = CenterScan(centers), []
    fastest = scan._fastest
    monkeypatch.setattr(
        scan, "_fastest", lambda ways, *rest: timed.append(ways) or fastest(ways, *rest)
    )
    expected = CenterScan(centers, matmul="numpy").nearest(rows, 8)
    for _ in range(3):
        found = scan.nearest(rows, 8)
        assert (found.ids == expected.ids).all()
        assert (found.scores == expected.scores).all()
    assert scan._choice is None
    with_lister = [way for ways in timed for way in ways if isinstance(way.lister, HeadScan)]
    assert len(with_lister) == (power > 0)


def test_one_thread_chooses_and_others_go_on(soon, monkeypatch):
    rows, centers = drawn(512, 128, 0), drawn(600, 128, 1)
    scan, chosen, meanwhile = CenterScan(centers), [], []

    def fastest(ways, *_):
        chosen.append(ways)
        with ThreadPoolExecutor(1) as other:
            meanwhile.append(other.submit(scan.nearest, rows, 8).result().scan.products)
        return ways[-1]

    monkeypatch.setattr(scan, "_fastest", fastest)
    scan.nearest(rows, 8)
    assert len(chosen) == 1
    assert meanwhile == ["numpy fp32"]
    assert scan._choice == "heads"


@pytest.mark.parametrize("error", [MemoryError, np.linalg.LinAlgError])
def test_heads_that_cannot_be_made_are_done_without(error, soon, monkeypatch):
    def failing(*_):
        raise error

    monkeypatch.setattr(heads, "Basis", failing)
    rows, centers = drawn(512, 128, 0, 2.0), drawn(600, 128, 1, 2.0)
    scan, expected = CenterScan(centers), CenterScan(centers, matmul="numpy").nearest(rows, 8)
    for _ in range(3):
        assert (scan.nearest(rows, 8).ids == expected.ids).all()
    assert scan._choice is None
    assert scan._way.lister is None


def test_an_answer_names_the_way_that_found_it(monkeypatch):
    """Another thread may choose meanwhile."""
    rows, centers = drawn(50, 128, 0), drawn(600, 128, 1)
    scan, chosen = CenterScan(centers, matmul="numpy"), CenterScan(centers, matmul="torch-int8")
    search = scan._search

    def interrupted(*args, **how):
        scan._way = chosen._way
        return search(*args, **how)

    monkeypatch.setattr(scan, "_search", interrupted)
    assert scan.nearest(rows, 8).scan.products == "numpy fp32"
    assert scan.nearest(rows, 8).scan.products == "torch int8 cpu"


def test_what_heads_leave_is_sought_from_the_previous_labels(monkeypatch):
    monkeypatch.setattr(HeadScan, "rooms", (1,))
    rows, centers = drawn(100, 128, 0, 0.0), drawn(600, 128, 1, 0.0)
    expected = CenterScan(centers, matmul="numpy").nearest(rows, 8)
    scan, seeds = with_heads(centers, 4, "torch-int8"), []
    find = scan._way.scan.find
    monkeypatch.setattr(
        scan._way.scan, "find", lambda *args, **how: seeds.append(args[3]) or find(*args, **how)
    )
    found = scan.nearest(rows, 8, previous=expected.ids)
    assert (found.ids == expected.ids).all()
    assert (seeds[0] == expected.ids[: len(seeds[0])]).all()


@pytest.mark.parametrize(("dimension", "length"), [(32, 1.0), (128, 1e13)])
def test_short_and_huge_vectors_have_no_heads(dimension, length, soon, monkeypatch):
    monkeypatch.setattr(head_choice, "promising_components", lambda *_: pytest.fail("asked"))
    rows, centers = drawn(512, dimension, 0), drawn(600, dimension, 1) * np.float32(length)
    scan = CenterScan(centers)
    for _ in range(3):
        scan.nearest(rows, 8)
    assert scan._choice is None
    assert scan._way.lister is None
