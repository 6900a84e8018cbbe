"""The effort is chosen and audited on rows that the index does not hold, and nothing is promised
that was not shown.
"""

import numpy as np
import pytest

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.indexes import tuning
from mlcd.indexes.index_kind import num_cells
from mlcd.indexes.scan import scan
from mlcd.indexes.tuning import kind_for, measure, rescore, tune, wilson
from mlcd.types import Neighbors, unit_rows


def clustered(num, dimension=48, seed=0):
    """Rows around 200 centers, as features are: neither uniform nor separable."""
    generator = np.random.default_rng(seed)
    centers = generator.standard_normal((200, dimension))
    rows = centers[generator.integers(200, size=num)] + 0.7 * generator.standard_normal(
        (num, dimension)
    )
    return unit_rows(rows)


@pytest.mark.parametrize(
    "kind", ["hnsw", "ivf-sq8", pytest.param("ivf-pq", marks=pytest.mark.slow)]
)
def test_the_audited_recall_reaches_the_target_and_is_true(kind):
    rows, fresh = clustered(12_000), clustered(12_400)[12_000:]
    tuned = tune(rows, 0.9, kind=kind)
    assert tuned.index is not None
    assert tuned.kind == kind
    assert tuned.recall.low >= 0.9
    assert tuned.recall.queries == 1000
    assert tuned.index.num_rows == len(rows)  # those that were held out are in it afterward
    found = tuned.index.search(fresh, 10 * tuned.widening, effort=tuned.effort)
    again = measure(rescore(fresh, rows, found, 10), scan(fresh, rows, 10), 0.9, len(rows))
    assert again.high >= 0.9
    assert abs(again.measured - tuned.recall.measured) < 0.05


def test_where_no_effort_reaches_the_target_there_is_no_index(monkeypatch):
    monkeypatch.setattr(tuning, "EFFORTS", (1,))
    assert tune(clustered(6_000), 0.99, kind="ivf-sq8").index is None


def test_a_row_finds_itself_at_its_own_number():
    rows = clustered(6_000)
    tuned = tune(rows, 0.9, kind="hnsw")
    found = tuned.index.search(rows, 1, effort=512)
    assert (found.ids[:, 0] == np.arange(len(rows))).mean() > 0.999


def test_every_row_is_told_once_and_whoever_is_told_may_end_the_work():
    for kind in ("flat", "hnsw", "ivf-sq8"):
        told = []
        tune(clustered(3_000), 0.9, kind=kind, advance=told.append)
        assert sum(told) == 3_000

    def stop(num):
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        tune(clustered(3_000), 0.9, kind="hnsw", advance=stop)


def test_an_effort_that_its_audit_does_not_confirm_is_not_taken():
    """The half that chooses is answered rightly at once, the half that audits from 64 on."""
    rows = clustered(3_000)
    queries = clustered(3_400, seed=1)[3_000:]
    truth = scan(queries, rows, 10)

    def search(part, effort):
        right = scan(queries[part], rows, 10)
        audited = part.start == 200
        return right if effort >= 64 or not audited else Neighbors(right.ids, right.scores - 0.5)

    efforts = tuning.graph_efforts()
    effort, recall = tuning.choose_effort(search, truth, 0.95, len(rows), efforts=efforts)
    assert (effort, recall.measured, recall.queries) == (64, 1.0, 200)


def test_recall_counts_ties_by_score():
    truth = Neighbors(np.array([[0, 1]]), np.array([[1.0, 0.5]], np.float32))
    tied = Neighbors(np.array([[0, 7]]), np.array([[1.0, 0.5]], np.float32))
    worse = Neighbors(np.array([[0, 8]]), np.array([[1.0, 0.4]], np.float32))
    assert measure(tied, truth, 0.9, 9).measured == 1.0
    assert measure(worse, truth, 0.9, 9).measured == 0.5


def test_the_interval_is_wilsons():
    # Brown, Cai, DasGupta (2001), equation 4: 10 of 10 has the lower bound 10 / (10 + 1.96^2).
    assert wilson(1.0, 10) == pytest.approx((10 / (10 + 1.959964**2), 1.0), abs=1e-6)
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)


def test_the_kind_follows_the_size():
    assert [kind_for(n) for n in (0, 49_999, 50_000, 250_000, 10_000_000)] == [
        "flat",
        "flat",
        "hnsw",
        "ivf-sq8",
        "ivf-pq",
    ]
    assert num_cells(1_000_000) == 4096
    assert num_cells(100) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hnsw", "ivf-sq8"])
def test_recall_on_real_features(kind, shared_data, tmp_path):
    """20,000 real images; `hog` for want of weights that ship with the project."""
    from mlcd.encoders import open_encoder
    from mlcd.images.sources import open_source
    from mlcd.pipelines.embed import embed
    from mlcd.progress import Reporter

    images = shared_data / "tiny_imagenet_pretrain" / "*.tar"
    artifact = embed(
        open_source(str(images)), open_encoder("hog"), tmp_path / "e", Reporter("silent")
    )
    rows = EmbeddingsArtifact(artifact).load()
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    tuned = tune(rows, 0.95, kind=kind)
    assert tuned.recall is not None
    assert tuned.recall.low >= 0.95
