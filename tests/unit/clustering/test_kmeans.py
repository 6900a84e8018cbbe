import faiss
import numpy as np
import pytest
import scipy.stats
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from sklearn.metrics import adjusted_rand_score
from threadpoolctl import threadpool_limits

from mlcd.artifacts.centers import Centers, majority_names
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Request
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.kmeans_plan import plan
from mlcd.clustering.nearest import CenterScan, nearest_centers
from mlcd.clustering.quality import purity
from mlcd.clustering.rows import ArrayRows, FileRows, UnitRows
from mlcd.errors import ArtifactInvalid, InvalidInput
from mlcd.types import unit_rows


def planted(num_clusters=8, per_cluster=40, dimension=16, noise=0.15):
    generator = np.random.default_rng(0)
    means = unit_rows(generator.standard_normal((num_clusters, dimension)))
    rows = np.repeat(means, per_cluster, axis=0) + noise * generator.standard_normal(
        (num_clusters * per_cluster, dimension)
    )
    return unit_rows(rows), np.repeat(np.arange(num_clusters), per_cluster)


def test_it_finds_planted_clusters():
    rows, truth = planted()
    best = max(
        (kmeans([rows], 8, seed=seed) for seed in range(8)), key=lambda result: result.objective[-1]
    )
    assert adjusted_rand_score(truth, best.assignment) > 0.99


def test_the_objective_never_falls_and_is_that_of_the_final_centers():
    rows, _ = planted(noise=0.6)
    result = kmeans([rows], 12, tolerance=0.0)
    assert all(
        later >= earlier - 1e-7
        for earlier, later in zip(result.objective, result.objective[1:], strict=False)
    )
    exact = (rows.astype(np.float64) @ result.centers.astype(np.float64).T).max(axis=1).mean()
    assert result.objective[-1] == pytest.approx(exact, abs=1e-7)


def test_one_iteration_equals_the_definition():
    rows, _ = planted(noise=0.6)
    start = kmeans([rows], 5, iterations=0)
    expected = np.stack(
        [rows[start.assignment == k].astype(np.float64).sum(axis=0) for k in range(5)]
    )
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert kmeans([rows], 5, iterations=1).centers == pytest.approx(expected, abs=1e-6)


def test_centers_are_unit_sizes_add_up_and_labels_are_the_nearest():
    rows, _ = planted(noise=0.6)
    result = kmeans([rows], 10)
    assert np.linalg.norm(result.centers, axis=1) == pytest.approx(np.ones(10), abs=1e-6)
    assert result.sizes.sum() == len(rows)
    assert (nearest_centers(rows, result.centers, 1).ids[:, 0] == result.assignment).all()


def test_blocks_do_not_change_a_bit_and_seeds_do():
    rows, _ = planted(noise=0.6)
    whole = kmeans([rows], 10, seed=3)
    blocks = kmeans([rows[:7], rows[7:100], rows[100:]], 10, seed=3)
    assert whole.centers.tobytes() == blocks.centers.tobytes()
    assert whole.objective == blocks.objective
    assert whole.centers.tobytes() != kmeans([rows], 10, seed=4).centers.tobytes()


def test_more_clusters_than_distinct_rows_are_refused():
    rows = np.repeat(unit_rows(np.eye(3)), 5, axis=0)
    with pytest.raises(InvalidInput, match="at most 3 clusters"):
        kmeans([rows], 4)
    assert sorted(kmeans([rows], 3).sizes) == [5, 5, 5]


def test_rows_that_are_not_finite_are_refused():
    rows, _ = planted()
    rows[11] = np.inf
    with pytest.raises(InvalidInput, match="row 11"):
        kmeans([rows], 2)


def test_going_on_from_the_state_of_any_iteration_changes_nothing():
    rows, _ = planted(noise=0.6)
    states = []
    whole = kmeans([rows], 12, seed=2, tolerance=0.0, iterations=8, on_start=states.append)
    assert [state.iteration for state in states] == list(range(9))
    for state in states:
        resumed = kmeans([rows], 12, seed=2, tolerance=0.0, iterations=8, start=state)
        assert resumed.centers.tobytes() == whole.centers.tobytes()
        assert (resumed.objective, resumed.num_splits) == (whole.objective, whole.num_splits)
        assert (resumed.sizes == whole.sizes).all()


def test_the_order_of_rows_does_not_change_a_bit_of_the_centers():
    rows, _ = planted(noise=0.6)
    order = np.random.default_rng(5).permutation(len(rows))
    start = rows[:10]
    straight = kmeans([rows], 10, start=start)
    permuted = kmeans([rows[order]], 10, start=start)
    assert permuted.centers.tobytes() == straight.centers.tobytes()
    assert (permuted.assignment == straight.assignment[order]).all()


def test_the_number_of_threads_does_not_change_a_bit():
    # Several BLAS blocks and several blocks of rows, and work enough for threads over each.
    rows = unit_rows(np.random.default_rng(0).standard_normal((9000, 256)))
    digests = set()
    for threads in (1, 2, 3):
        with threadpool_limits(threads):
            digests.add(kmeans([rows], 150, iterations=4).centers.tobytes())
    assert len(digests) == 1


def test_a_rotation_does_not_change_the_objective():
    rows, _ = planted(noise=0.6)
    rotation, _ = np.linalg.qr(np.random.default_rng(1).standard_normal((16, 16)))
    turned = unit_rows(rows @ rotation)
    straight = kmeans([rows], 9, iterations=5, start=rows[:9])
    assert kmeans([turned], 9, iterations=5, start=turned[:9]).objective == pytest.approx(
        straight.objective, abs=1e-6
    )


def test_more_clusters_fit_better_and_every_center_is_its_own_nearest():
    rows, _ = planted(num_clusters=40, noise=0.6)
    results = {k: kmeans([rows], k) for k in (32, 64)}
    assert results[64].objective[-1] > results[32].objective[-1]
    centers = results[64].centers
    assert (nearest_centers(centers, centers, 1).ids[:, 0] == np.arange(64)).all()


def test_each_iteration_equals_faiss():
    rows = unit_rows(np.random.default_rng(3).standard_normal((4000, 24)))
    centers = rows[:30].copy()
    for _ in range(6):
        theirs = faiss.Kmeans(
            24,
            30,
            niter=1,
            spherical=True,
            early_stop_threshold=-1,
            max_points_per_centroid=10**6,
            seed=1,
        )
        theirs.train(rows, init_centroids=centers)
        ours = kmeans([rows], 30, iterations=1, start=centers)
        assert ours.centers == pytest.approx(theirs.centroids, abs=1e-5)
        assert ours.objective[0] * len(rows) == pytest.approx(theirs.obj[0], rel=1e-5)
        centers = ours.centers


def test_it_finds_a_mixture_of_von_mises_fisher():
    means = unit_rows(np.random.default_rng(8).standard_normal((20, 32)))
    parts = [
        scipy.stats.vonmises_fisher(mean, kappa=120).rvs(60, random_state=k)
        for k, mean in enumerate(means)
    ]
    rows, truth = unit_rows(np.concatenate(parts)), np.repeat(np.arange(20), 60)
    best = max(
        (kmeans([rows], 20, seed=seed) for seed in range(12)),
        key=lambda result: result.objective[-1],
    )
    assert adjusted_rand_score(truth, best.assignment) > 0.9
    # And no start finds more than the truth itself is worth.
    assert best.objective[-1] <= kmeans([rows], 20, start=means).objective[-1] + 1e-9


def test_digits_cluster_as_well_as_by_scikit_learn():
    pixels, digits = load_digits(return_X_y=True)
    rows = unit_rows(pixels)
    ours = kmeans([rows], 40, seed=0)
    theirs = KMeans(40, n_init=1, random_state=0).fit(rows)
    unit = unit_rows(theirs.cluster_centers_)
    reached = (rows.astype(np.float64) @ unit.T.astype(np.float64)).max(axis=1).mean()
    assert ours.objective[-1] > reached - 0.003
    names = [str(digit) for digit in digits]
    assert purity(ours.assignment, names) > purity(theirs.labels_, names) - 0.05


def test_repeated_rows_leave_no_center_without_rows():
    distinct = unit_rows(np.random.default_rng(0).standard_normal((40, 8)))
    rows = np.repeat(distinct, 1 + np.arange(40) ** 2 // 20, axis=0)
    result = kmeans([rows], 40, seed=1)
    assert (result.sizes > 0).all()
    assert result.objective[-1] == pytest.approx(1.0, abs=1e-6)
    assert len({center.tobytes() for center in kmeans([rows], 30, seed=1).centers}) == 30


def test_past_two_to_the_twenty_four_rows_nothing_saturates():
    # In float32 a sum of similarities stops at 2^24, and training with it.
    count = 2**24 + 2**20
    tile = unit_rows(np.random.default_rng(0).standard_normal((2**17, 4)))
    repeats = count // len(tile)
    result = kmeans([tile] * repeats, 4, iterations=2, tolerance=0.0, start=tile[:4])
    once = kmeans([tile], 4, iterations=2, tolerance=0.0, start=tile[:4])
    assert len(result.objective) == 3
    assert result.objective == pytest.approx(once.objective, abs=1e-12)
    assert result.centers.tobytes() == once.centers.tobytes()
    assert (result.sizes == repeats * once.sizes).all()
    centers = result.centers.astype(np.float64)
    centers /= np.linalg.norm(centers, axis=1, keepdims=True)
    exact = (tile.astype(np.float64) @ centers.T).max(axis=1).mean()
    assert result.objective[-1] == pytest.approx(exact, abs=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 72 billion products, each compared once: 2 minutes of two quiet cores
def test_more_clusters_than_a_gpu_library_takes():
    """cuVS refused more than 262,144 (cuvs #1805)."""
    num_clusters = 262_144 + 77
    rows = unit_rows(np.random.default_rng(0).standard_normal((num_clusters + 5000, 4)))
    result = kmeans([rows], num_clusters, iterations=1)
    assert result.sizes.sum() == len(rows)
    assert (result.sizes > 0).all()
    found = CenterScan(result.centers).nearest(rows[:200], 1)
    exact = (rows[:200].astype(np.float64) @ result.centers.astype(np.float64).T).max(axis=1)
    assert found.scores[:, 0] == pytest.approx(exact, abs=1e-6)
    assert exact.mean() > 0.9999


def test_the_centers_artifact_round_trips(tmp_path):
    rows, _ = planted()
    result = kmeans([rows], 4)
    mean = rows.mean(axis=0)
    original = Centers(result.centers, result.sizes, "f" * 64, ("a", None, "ü", "d"), mean)
    with Draft(tmp_path / "centers", Request("centers", fingerprint="f" * 64)) as draft:
        original.write(draft)
        draft.publish()
    read = Centers.open(tmp_path / "centers")
    assert read.vectors.tobytes() == original.vectors.tobytes()
    assert read.names == original.names
    assert read.align(rows) == pytest.approx(unit_rows(rows - mean), abs=1e-6)
    with pytest.raises(ArtifactInvalid, match="values, one per center"):
        Centers(result.centers, result.sizes[:-1], "f" * 64)


def test_names_are_the_majority_of_known_classes():
    assignment = np.array([0, 0, 0, 1, 1, 2])
    assert majority_names(assignment, ["b", "a", "b", "z", "y", None], 4) == ("b", "y", None, None)


@pytest.mark.slow
def test_more_numbers_than_2_to_the_31(tmp_path):
    """The same rows again and again move no center, however many they are."""
    once = unit_rows(np.random.default_rng(0).standard_normal((8192, 512))).astype(np.float16)
    repeats = 2**31 // once.size + 1
    with (tmp_path / "rows.npy").open("wb") as file:
        shape = {"descr": "<f2", "fortran_order": False, "shape": (repeats * len(once), 512)}
        np.lib.format.write_array_header_1_0(file, shape)
        for _ in range(repeats):
            once.tofile(file)
    start = unit_rows(once[:3].astype(np.float32))
    alone = kmeans([once], 3, iterations=1, start=start)
    result = kmeans(FileRows([tmp_path / "rows.npy"]), 3, iterations=1, start=start)
    assert result.sizes.tolist() == (repeats * alone.sizes).tolist()
    assert result.centers == pytest.approx(alone.centers, abs=1e-7)
    assert result.objective == pytest.approx(alone.objective, abs=1e-9)
    assert np.array_equal(
        result.assignment.reshape(repeats, -1), np.broadcast_to(alone.assignment, (repeats, 8192))
    )


@pytest.mark.parametrize(("kept_bytes", "passes"), [(4 * 500 * 12, 1), (4 * 500 * 12 - 1, 4)])
def test_rows_are_read_once_where_they_are_few(monkeypatch, kept_bytes, passes):
    class Counted(ArrayRows):
        num_passes = 0

        def blocks(self, start, stop):
            self.num_passes += 1
            return super().blocks(start, stop)

    monkeypatch.setattr("mlcd.clustering.rows._KEPT_BYTES", kept_bytes)
    values = unit_rows(np.random.default_rng(0).standard_normal((500, 12)))
    rows = Counted([values])
    found = kmeans(UnitRows(rows), 7, iterations=3, tolerance=-1.0)
    assert rows.num_passes == passes
    assert (found.centers == kmeans([values], 7, iterations=3, tolerance=-1.0).centers).all()


@pytest.mark.parametrize(("num_rows", "kept"), [(500, 4 * 500 * 12), (501, 0)])
def test_a_plan_counts_the_rows_that_are_kept(monkeypatch, num_rows, kept):
    def planned():
        return plan(num_rows, 7, 12, iterations=3, flops_per_s=1.0).memory_bytes

    monkeypatch.setattr("mlcd.clustering.rows._KEPT_BYTES", 4 * 500 * 12)
    memory = planned()
    monkeypatch.setattr("mlcd.clustering.rows._KEPT_BYTES", 0)
    assert memory - planned() == kept


def test_no_rows_are_refused():
    with pytest.raises(InvalidInput, match="at least 1 row"):
        kmeans([np.empty((0, 4), np.float32)], 1, start=unit_rows(np.eye(4)[:1]))


def test_copies_of_one_row_in_float16_are_not_split():
    rng = np.random.default_rng(0)
    copied = np.repeat(unit_rows(rng.standard_normal((1, 24))), 1000, axis=0)
    rows = np.concatenate([copied, unit_rows(rng.standard_normal((20, 24)))]).astype(np.float16)
    start = unit_rows(np.stack([rows[0], rows[1005], -rows[0]]).astype(np.float32))
    result = kmeans([rows], 3, iterations=12, start=start)
    assert result.sizes.min() > 0
    assert result.num_splits <= 1


def narrow_cone(spread, num=3000, dimension=32):
    """Returns rows of 20 groups whose mean cosine with their common direction is 1 - spread / 2."""
    generator = np.random.default_rng(3)
    means = generator.standard_normal((20, dimension))
    offsets = 0.4 * means[generator.integers(0, 20, num)] + generator.standard_normal(
        (num, dimension)
    )
    offsets *= np.sqrt(spread / (offsets**2).sum(axis=1).mean())
    return unit_rows(np.eye(dimension)[0] + offsets)


@pytest.mark.parametrize("spread", [2e-5, 2e-7])
def test_rows_in_a_narrow_cone_are_clustered_to_the_end(spread):
    rows = narrow_cone(spread)
    start = rows[:20]
    settled = kmeans([rows], 20, start=start, iterations=60)
    to_the_end = kmeans([rows], 20, start=start, iterations=60, tolerance=-1.0)
    left = 1 - np.array(to_the_end.objective)
    assert len(settled.objective) > 10
    assert 1 - settled.objective[-1] <= left[-1] + 1e-3 * (left[0] - left[-1])


def test_the_objective_of_a_narrow_cone_never_falls():
    rows = narrow_cone(2e-8)
    objective = np.array(kmeans([rows], 20, start=rows[:20], tolerance=-1.0).objective)
    assert (np.diff(objective) >= -1e-13).all()


def test_equal_rows_need_one_update():
    assert len(kmeans([np.repeat(unit_rows(np.ones((1, 7))), 30, axis=0)], 1).objective) == 2
