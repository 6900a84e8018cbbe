"""The pooled model of arms and seeds, against ordinary least squares on dummy columns."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import t

from studies.losses.frozen.arms import NAMED
from studies.losses.frozen.report import main
from studies.losses.instrument.asked import ASKED, HELD_OUT
from studies.losses.instrument.pooled import Pooled, holm
from studies.losses.instrument.rows import table_of

KINDS = ("knn", "probe")


def test_a_difference_is_that_of_least_squares():
    rng = np.random.default_rng(0)
    seeds, arms = 7, ["a", "b", "c"]
    values = rng.standard_normal((seeds, 3)) + rng.standard_normal((seeds, 1)) + [0, 1, 2]
    by_arm = {arm: dict(enumerate(values[:, each])) for each, arm in enumerate(arms)}
    by_arm["b"][99] = 5.0  # a seed that the others lack
    found = Pooled.of(by_arm).difference("c", "a", margin=0.5)

    design = np.zeros((seeds * 3, seeds + 2))
    for seed in range(seeds):
        for arm in range(3):
            design[3 * seed + arm, seed] = 1
            if arm:
                design[3 * seed + arm, seeds + arm - 1] = 1
    solved, residual, *_ = np.linalg.lstsq(design, values.ravel(), rcond=None)
    freedom = seeds * 3 - seeds - 2
    error = np.sqrt(residual[0] / freedom * np.linalg.inv(design.T @ design)[-1, -1])
    assert found.mean == pytest.approx(solved[-1])
    assert found.half_width == pytest.approx(t.ppf(0.975, freedom) * error)
    assert found.p == pytest.approx(2 * t.sf(solved[-1] / error, freedom))
    assert found.p_equal == pytest.approx(
        max(t.sf((solved[-1] + 0.5) / error, freedom), t.cdf((solved[-1] - 0.5) / error, freedom))
    )


def test_holm_raises_what_is_tested_among_many():
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([0.6, 0.7]) == [1.0, 1.0]


def test_the_report_says_what_rows_were_made_to_show(tmp_path, capsys, monkeypatch):
    rng = np.random.default_rng(0)
    rows = []
    for seed in range(1, 7):
        for name, arm in NAMED.items():
            accuracy = 0.5 + 0.02 * (name == "MLCD(b = +4)") + 0.0001 * rng.standard_normal()
            asked = {f"{what}_{each}": accuracy for each in (*ASKED, HELD_OUT) for what in KINDS}
            cosines = {"positive_cosine": 0.5 - arm.bias / 100, "negative_cosine": 0.0}
            rows.append(
                {"teacher": "hog", "arm": arm.name, "seed": seed, "scale": arm.scale}
                | asked
                | cosines
            )
    pq.write_table(pa.Table.from_pylist(rows), table_of("frozen", tmp_path))
    monkeypatch.setattr("sys.argv", ["report", "--results", str(tmp_path)])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "## hog: 48 runs"
    (better,) = (line for line in lines if line.startswith("| MLCD(b = +4) - MLCD |"))
    assert "**+2.0" in better
    assert "not shown" in better
    (alike,) = (line for line in lines if line.startswith("| MLCD - MLC |"))
    assert "| yes |" in alike
    assert any(line.startswith("Equal resting point: Eq. 5 less Eq. 4") for line in lines)
    assert "Surface: too few arms." in lines
