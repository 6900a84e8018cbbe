import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcd.clustering import arithmetics, certified_scan, nearest, row_threads
from mlcd.clustering.exact_scores import exact_scores, scores_of_each
from mlcd.clustering.nearest import CenterScan, nearest_centers
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.types import unit_rows

pytestmark = pytest.mark.plain_cpu

ARITHMETICS = ["numpy", "torch-int8"]


def brute_force(z, centers, top, threshold=None):
    """float64, a double loop, the total order spelled out."""
    ids = np.full((len(z), top), -1)
    scores = np.full((len(z), top), -np.inf)
    for row in range(len(z)):
        exact = [
            float(np.dot(z[row].astype(np.float64), center.astype(np.float64)))
            for center in centers
        ]
        order = sorted(range(len(centers)), key=lambda j: (-exact[j], j))
        kept = [j for j in order[:top] if threshold is None or exact[j] >= threshold]
        ids[row, : len(kept)] = kept
        scores[row, : len(kept)] = [exact[j] for j in kept]
    return ids, scores


def random_rows(num, dimension, seed=0):
    return unit_rows(np.random.default_rng(seed).standard_normal((num, dimension)))


@pytest.mark.parametrize("top", [1, 2, 8, 32])
@pytest.mark.parametrize("threshold", [None, 0.1, 0.99])
def test_equals_brute_force(top, threshold):
    z, centers = random_rows(40, 16), random_rows(101, 16, seed=1)
    found = nearest_centers(z, centers, top, threshold)
    ids, scores = brute_force(z, centers, top, threshold)
    assert (found.ids == ids).all()
    assert found.scores == pytest.approx(scores, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    dimension=st.integers(1, 4),
    num=st.integers(1, 40),
    top=st.integers(1, 12),
)
def test_ties_go_to_the_lower_id(seed, dimension, num, top):
    generator = np.random.default_rng(seed)
    # Few distinct directions: many exact ties, duplicate centers among them.
    centers = unit_rows(generator.choice([-1.0, 1.0, 2.0], size=(num, dimension)))
    z = unit_rows(generator.choice([-1.0, 1.0], size=(5, dimension)))
    ids, _ = brute_force(z, centers, top)
    assert (nearest_centers(z, centers, top).ids == ids).all()


def test_all_negative_similarities_and_more_labels_than_centers():
    centers = -random_rows(3, 8) - 0.5
    z = unit_rows(np.ones((2, 8)))
    found = nearest_centers(z, unit_rows(centers), 5)
    assert (found.ids[:, :3] >= 0).all()
    assert (found.scores[:, :3] < 0).all()
    assert (found.ids[:, 3:] == -1).all()
    assert np.isneginf(found.scores[:, 3:]).all()


def test_near_ties_below_float32_are_ordered_by_the_exact_score():
    generator = np.random.default_rng(0)
    base = unit_rows(generator.standard_normal((1, 256)))
    centers = np.repeat(base, 500, axis=0)
    centers[np.arange(500), generator.integers(0, 256, 500)] += np.float32(1e-8)
    z = random_rows(20, 256, seed=1)
    assert (nearest_centers(z, centers, 8).ids == brute_force(z, centers, 8)[0]).all()


def test_the_answer_does_not_depend_on_the_block(monkeypatch):
    z, centers = random_rows(57, 32), random_rows(77, 32, seed=1)
    whole = nearest_centers(z, centers, 8)
    monkeypatch.setattr(certified_scan, "BLOCK_CENTERS", 10)
    monkeypatch.setattr(certified_scan.CertifiedScan, "batch_rows", 5)
    blocked = nearest_centers(z, centers, 8)
    assert (whole.ids == blocked.ids).all()
    assert (whole.scores == blocked.scores).all()


def test_where_a_stage_settles_little_the_next_batches_leave_it_out(monkeypatch):
    """Two opposite middles and 400 near each: more than there is room for lie within the slack of
    any answer.
    """
    monkeypatch.setattr(certified_scan.CertifiedScan, "batch_rows", 16)
    monkeypatch.setattr(certified_scan.CertifiedScan, "rooms", (8,))
    monkeypatch.setattr(row_threads, "allowed_threads", lambda: 1)
    middles = np.repeat(random_rows(1, 64), 800, axis=0) * np.repeat([1, -1], 400)[:, None]
    centers = unit_rows(middles + 1e-3 * np.random.default_rng(1).standard_normal((800, 64)))
    z = unit_rows(centers[:50] + 0.05 * random_rows(50, 64, seed=2))
    scan = CenterScan(centers, matmul="torch-int8")
    asked = []
    shortlist = scan._way.scan.shortlist
    monkeypatch.setattr(
        scan._way.scan, "shortlist", lambda *args: asked.append(1) or shortlist(*args)
    )
    found = scan.nearest(z, 8)
    assert (found.ids == brute_force(z, centers, 8)[0]).all()
    assert len(asked) == 1
    assert found.scan.proven == 0


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("matmul", ARITHMETICS)
def test_a_scan_over_several_blocks_and_batches_equals_one_in_float64(matmul, threads, monkeypatch):
    monkeypatch.setattr(certified_scan, "BLOCK_CENTERS", 128)
    monkeypatch.setattr(row_threads, "allowed_threads", lambda: threads)
    families = np.repeat(random_rows(60, 48, seed=2), 32, axis=0)
    families += np.float32(3e-3) * random_rows(1920, 48, seed=3)
    z = unit_rows(families[::4] + 0.1 * random_rows(480, 48, seed=4))
    exact = z.astype(np.float64) @ families.astype(np.float64).T
    found = CenterScan(families, matmul=matmul).nearest(z, 8)
    assert (found.ids == np.argsort(-exact, axis=1, kind="stable")[:, :8]).all()


@pytest.mark.parametrize(
    ("num_centers", "dimension", "with_torch", "products"),
    [
        (300, 64, True, "numpy fp32"),
        (9000, 63, True, "numpy fp32"),
        (1200, 256, True, "torch int8 cpu"),
        (1200, 256, False, "numpy fp32"),
        (5000, 64, False, "torch int8 cpu"),
    ],
)
def test_the_arithmetic_changes_once_there_is_work(
    num_centers, dimension, with_torch, products, monkeypatch
):
    """Few centers do not repay the import of torch, nor very few its products."""
    z, centers = random_rows(600, dimension), random_rows(num_centers, dimension, seed=1)
    with monkeypatch.context() as patched:
        if not with_torch:
            patched.delitem(sys.modules, "torch")
        names = arithmetics.fastest_matmuls(centers)
    monkeypatch.setattr(nearest, "fastest_matmuls", lambda *_, **__: names)
    monkeypatch.setattr(nearest, "WORTH_TORCH", 1200 * centers.size)
    scan = CenterScan(centers)
    found = [scan.nearest(z, 8) for _ in range(2)]
    assert [each.scan.products for each in found] == ["numpy fp32", products]
    assert (found[1].ids == found[0].ids).all()
    assert (found[1].scores == found[0].scores).all()


def test_calls_of_few_rows_do_not_change_the_arithmetic(monkeypatch):
    monkeypatch.setattr(nearest, "WORTH_TORCH", 1)
    scan = CenterScan(random_rows(5000, 64))
    scan.nearest(random_rows(255, 64, seed=1), 8)
    assert scan.products == "numpy fp32"


def test_a_shorter_list_is_a_prefix_of_a_longer_one():
    z, centers = random_rows(30, 16), random_rows(50, 16, seed=1)
    assert (nearest_centers(z, centers, 3).ids == nearest_centers(z, centers, 9).ids[:, :3]).all()


def test_permuted_centers_permute_the_labels():
    z, centers = random_rows(30, 16), random_rows(50, 16, seed=1)
    order = np.random.default_rng(2).permutation(50)
    assert (
        order[nearest_centers(z, centers[order], 4).ids] == nearest_centers(z, centers, 4).ids
    ).all()


def test_bad_rows_are_named():
    z = random_rows(4, 8)
    z[2, 3] = np.nan
    with pytest.raises(InvalidInput, match="embeddings row 2"):
        nearest_centers(z, random_rows(5, 8))
    with pytest.raises(InvalidInput, match="same model"):
        nearest_centers(random_rows(4, 8), random_rows(5, 9))
    with pytest.raises(ConfigInvalid, match="top"):
        nearest_centers(random_rows(4, 8), random_rows(5, 8), 0)


def test_no_rows_give_no_labels():
    assert nearest_centers(np.zeros((0, 8), np.float32), random_rows(5, 8), 3).ids.shape == (0, 3)


def families_of(dimension):
    members = np.repeat(random_rows(12, dimension, seed=8), 32, axis=0)
    return members + np.float32(3e-3) * random_rows(384, dimension, seed=9)


def hard_cases():
    """name, rows, centers: what rounding confuses."""
    generator = np.random.default_rng(0)
    families = np.repeat(
        random_rows(40, 64, seed=2), 32, axis=0
    ) + 1e-3 * generator.standard_normal((1280, 64))
    yield "families of near-duplicates", random_rows(50, 64), unit_rows(families)
    negative = unit_rows(np.abs(generator.standard_normal((700, 24))))
    yield (
        "all similarities negative",
        -unit_rows(np.abs(generator.standard_normal((30, 24)))),
        negative,
    )
    yield "duplicates", random_rows(30, 16), np.repeat(random_rows(9, 16, seed=3), 37, axis=0)
    yield "one center", random_rows(5, 16), random_rows(1, 16, seed=3)
    yield (
        "one dimension",
        unit_rows(generator.standard_normal((9, 1))),
        unit_rows(generator.standard_normal((300, 1))),
    )
    yield "a group and a bit", random_rows(20, 8), random_rows(65, 8, seed=4)
    yield (
        "rows near zero, and zero",
        random_rows(20, 16) * np.repeat(np.float32([1e-20, 1e-41, 0, 1]), 5)[:, None],
        random_rows(300, 16, seed=4),
    )
    spread = unit_rows(generator.standard_normal((1, 96)) + np.zeros((400, 96)))
    steps = np.linspace(0, 2e-2, 400, dtype=np.float32)[:, None]  # about the error of int8
    spread += steps * random_rows(1, 96, seed=5)
    yield "a family as wide as the error bound", random_rows(30, 96), spread
    tall = random_rows(500, 32, seed=6)
    tall[::7, 3] = 4.0  # one component rules the scale of a row
    yield "one large component", unit_rows(tall[:40]), unit_rows(tall)
    cone = np.float32(3) * random_rows(1, 48, seed=7)
    yield "a narrow cone", unit_rows(random_rows(30, 48) + cone), unit_rows(families_of(48) + cone)
    yield (
        "a huge common mean",
        random_rows(30, 48) + np.float32(100) * cone,
        np.repeat(random_rows(100, 48, seed=8) + np.float32(100) * cone, 3, axis=0),
    )
    yield (
        "lengths that differ",
        random_rows(20, 8) * np.float32(30),
        random_rows(500, 8, seed=4) * np.float32(0.01),
    )


@pytest.mark.parametrize("matmul", ARITHMETICS)
@pytest.mark.parametrize("case", list(hard_cases()), ids=lambda case: case[0])
@pytest.mark.parametrize("top", [1, 8])
def test_every_arithmetic_gives_the_same_exact_answer(matmul, case, top, monkeypatch):
    monkeypatch.setattr(certified_scan, "BLOCK_CENTERS", 96)
    _, z, centers = case
    found = CenterScan(centers, matmul=matmul).nearest(z, top)
    ids, scores = brute_force(z, centers, top)
    assert (found.ids == ids).all()
    assert found.scores == pytest.approx(scores, rel=1e-6)
    counts = found.scan
    assert counts.proven + counts.wider + counts.float32 + counts.float64 == len(z)


@pytest.mark.parametrize("matmul", ARITHMETICS)
def test_on_embeddings_without_ties_the_first_pass_proves_every_row(matmul):
    z, centers = random_rows(300, 128), random_rows(9001, 128, seed=1)
    found = CenterScan(centers, matmul=matmul).nearest(z, 8)
    assert (found.ids == CenterScan(centers, matmul="numpy").nearest(z, 8).ids).all()
    assert found.scan.proven > 0.99 * len(z)


def test_what_cannot_be_proven_goes_down_the_ladder():
    z, centers = random_rows(20, 16), np.repeat(random_rows(9, 16, seed=3), 2000, axis=0)
    assert CenterScan(centers, matmul="torch-int8").nearest(z, 8).scan.float64 == 20
    assert CenterScan(centers[::20], matmul="numpy").nearest(z, 8).scan.proven == 20
    near = unit_rows(centers + 1e-4 * np.random.default_rng(0).standard_normal(centers.shape))
    assert CenterScan(near, matmul="torch-int8").nearest(z, 8).scan.float32 == 20


def test_more_centers_than_a_gpu_library_takes():
    """cuVS refused more than 262,144 (cuvs #1805)."""
    z, centers = random_rows(7, 4), random_rows(262_144 + 77, 4, seed=1)
    found = CenterScan(centers).nearest(z, 8)
    exact = z.astype(np.float64) @ centers.astype(np.float64).T
    assert (found.ids == np.argsort(-exact, axis=1, kind="stable")[:, :8]).all()


def test_torch_is_not_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(arithmetics, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "mlcd.clustering.int8_matmul", raising=False)
    z, centers = random_rows(5, 8), random_rows(9000, 8, seed=1)
    assert CenterScan(centers).nearest(z, 3).scan.products == "numpy fp32"
    with pytest.raises(ConfigInvalid, match="needs torch"):
        CenterScan(centers, matmul="torch-int8")


@pytest.mark.parametrize("matmul", ARITHMETICS)
def test_one_scan_serves_several_threads(matmul):
    """The service does this: the products of one thread must not overwrite another's."""
    scan = CenterScan(random_rows(3000, 32, seed=1), matmul=matmul)
    batches = [random_rows(64, 32, seed=seed) for seed in range(16)]
    expected = [scan.nearest(z, 8).ids for z in batches]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            found = list(pool.map(lambda z: scan.nearest(z, 8).ids, batches))
            assert all((a == b).all() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("matmul", ARITHMETICS)
def test_products_that_overflow_are_decided_in_float64(matmul):
    z, centers = random_rows(20, 64) * np.float32(1e25), random_rows(700, 64, seed=1)
    centers *= np.float32(1e15)
    with np.errstate(all="ignore"):
        found = CenterScan(centers, matmul=matmul).nearest(z, 8)
    assert (found.ids == brute_force(z, centers, 8)[0]).all()


@pytest.mark.parametrize("dimension", [1, 3, 16, 31, 64, 129, 768, 1280, 9000])
def test_a_score_has_the_same_bits_alone_and_among_others(dimension):
    """Else two equal centers could change places."""
    z, centers = random_rows(20, dimension), random_rows(50, dimension, seed=1)
    ids = np.random.default_rng(2).integers(0, 50, (20, 9))
    among = scores_of_each(z, centers, ids)
    alone = exact_scores(z, centers, np.repeat(np.arange(20), 9), ids.ravel())
    assert among.tobytes() == alone.tobytes()
    ids[3, 4] = -1
    assert scores_of_each(z, centers, ids)[3, 4] == -np.inf


@pytest.mark.parametrize("top", [1, 2])
def test_ties_of_long_embeddings_go_to_the_lower_id(top):
    """numpy divides sums of more than 8,192 components, elsewhere for other shapes."""
    for seed in range(10):
        centers = np.repeat(random_rows(1, 9000, seed), 5, axis=0)
        z = random_rows(2, 9000, seed + 100)
        for rows in (z, z[:1]):
            found = nearest_centers(rows, centers, top)
            assert (found.ids == np.arange(top)).all()


@pytest.mark.parametrize("matmul", ARITHMETICS)
@pytest.mark.parametrize("layout", [np.asfortranarray, lambda rows: rows[::-1]])
def test_the_layout_in_memory_changes_nothing(matmul, layout):
    centers, z = layout(random_rows(640, 32)), layout(random_rows(40, 32, seed=1))
    expected = nearest_centers(np.ascontiguousarray(z), np.ascontiguousarray(centers), 4)
    found = CenterScan(centers, matmul=matmul).nearest(z, 4)
    assert (found.ids == expected.ids).all()
    assert (found.scores == expected.scores).all()


@pytest.mark.parametrize("length", [1e-6, 1e5])
def test_ties_of_rows_of_any_length_are_settled_in_float64(length):
    rng = np.random.default_rng(0)
    centers = np.repeat(random_rows(40, 61), 30, axis=0)[rng.permutation(1200)]
    z = np.float32(length) * random_rows(40, 61, seed=1)
    ids, _ = CenterScan(centers)._in_float64(z, 30)
    for row, own in zip(z, ids, strict=True):
        exact = exact_scores(row[None], centers, np.zeros(1200, np.int64), np.arange(1200))
        assert (own == np.lexsort((np.arange(1200), -exact))[:30]).all()


def test_vectors_without_components_are_all_equal():
    found = CenterScan(np.empty((9, 0), np.float32)).nearest(np.empty((3, 0), np.float32), 2)
    assert found.ids.tolist() == [[0, 1]] * 3
