"""The verdict: what was planted in made rows is found, what is equal is called so, and no more."""

import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import t

from mlcd.errors import ArtifactInvalid
from studies.losses.frozen.arms import NAMED, sweeps
from studies.losses.instrument.asked import ASKED, HELD_OUT
from studies.losses.instrument.paired import paired_difference
from studies.losses.instrument.rows import table_of
from studies.losses.marked import filled, table
from studies.losses.mosaics.arms import MOSAIC_ARMS
from studies.losses.scales.arms import pair_arms
from studies.losses.towers.arms import INSTANCE_ARMS, TOWER_ARMS
from studies.losses.verdict.__main__ import main
from studies.losses.verdict.all_rows import AllRows
from studies.losses.verdict.contrasts import Contrast, corrected, findings
from studies.losses.verdict.evidence import SET_SIZES, UNSEEN, by_arm, right_bits, value_of
from studies.losses.verdict.mosaic_effects import (
    by_objects,
    covariate_effects,
    least_squares,
    trend,
)
from studies.losses.verdict.over_images import over_images
from studies.losses.verdict.rate_tables import other_rates
from studies.losses.verdict.resting import (
    at_rest,
    comparable_arms,
    reading_error,
    resting_arms,
    surface,
)

DOCS = Path(__file__).resolve().parents[3] / "docs"
FEW = {HELD_OUT: 16, **dict.fromkeys(ASKED, 400)}
ORIGIN = {"cpu": "a cpu", "device": "cpu", "torch": "2", "commit": "abc", "train_s": 2.0}


def row_of(arm, seed, accuracy, *, cosine=0.3, bits=b"", **fields):
    asked = {f"{what}_{each}": accuracy for each in (*ASKED, HELD_OUT) for what in ("knn", "probe")}
    cosines = {"positive_cosine": cosine, "negative_cosine": cosine / 4 - 0.2}
    return {"run": f"{fields.get('teacher')}/{arm.name}/seed{seed}", **asdict(arm), "arm": arm.name, "seed": seed, "right": bits, **asked, **cosines,
            **ORIGIN, **fields}  # fmt: skip


def named_rows(accuracy, seeds=range(1, 7), **fields):
    rng = np.random.default_rng(0)
    return [
        row_of(arm, seed, accuracy(name) + 0.0005 * rng.standard_normal(), **fields)
        for seed in seeds
        for name, arm in NAMED.items()
    ]


CONTRASTS = [
    Contrast("planted", NAMED["MLCD(b = +4)"].name, NAMED["MLCD"].name),
    Contrast("alike", NAMED["MLCD"].name, NAMED["MLC"].name),
    Contrast("small", NAMED["CD"].name, NAMED["MLCD"].name),
]


def test_a_planted_difference_is_found_and_an_equal_one_is_called_equal():
    planted = {"MLCD(b = +4)": 0.52, "CD": 0.502}
    rows = named_rows(lambda name: planted.get(name, 0.5))
    larger, alike, small = findings(by_arm(rows, UNSEEN), CONTRASTS)
    assert larger.difference.mean == pytest.approx(0.02, abs=0.001)
    assert (larger.verdict, larger.seeds) == ("higher", 6)
    assert alike.verdict == "equal within 0.5"
    assert small.verdict == "higher, by less than 0.5"


def test_too_much_noise_shows_neither_a_difference_nor_equality():
    rng = np.random.default_rng(3)
    rows = [
        row_of(arm, seed, 0.5 + 0.02 * rng.standard_normal())
        for seed in range(4)
        for arm in NAMED.values()
    ]
    assert {each.verdict for each in findings(by_arm(rows, UNSEEN), CONTRASTS)} == {
        "not told apart"
    }


def test_an_arm_that_is_not_run_takes_nothing_from_the_others():
    rows = named_rows(lambda name: 0.5)
    rows = [row for row in rows if row["arm"] != NAMED["CD"].name]
    assert [each.verdict for each in findings(by_arm(rows, UNSEEN), CONTRASTS)] == [
        "equal within 0.5", "equal within 0.5", "not run",
    ]  # fmt: skip
    assert findings({}, CONTRASTS)[0].verdict == "not run"


def test_seeds_that_only_some_arms_have_are_used_and_stated():
    rows = [
        row
        for row in named_rows(lambda name: 0.52 if name == "CD" else 0.5)
        if row["arm"] != NAMED["CD"].name or row["seed"] <= 3
    ]
    found = findings(by_arm(rows, UNSEEN), CONTRASTS)
    assert [each.seeds for each in found] == [6, 6, 3]
    assert found[2].difference.mean == pytest.approx(0.02, abs=0.001)


def test_a_noisy_arm_widens_no_interval_but_its_own():
    def noisy(deviation):
        rng = np.random.default_rng(5)
        rows = named_rows(lambda name: 0.5)
        return [
            row_of(NAMED["CD"], row["seed"], 0.5 + deviation * rng.standard_normal())
            if row["arm"] == NAMED["CD"].name
            else row
            for row in rows
        ]

    quiet, loud = (findings(by_arm(noisy(each), UNSEEN), CONTRASTS) for each in (0.0005, 0.02))
    assert quiet[:2] == loud[:2]
    assert loud[2].difference.half_width > 10 * quiet[2].difference.half_width


def test_holm_counts_the_hypotheses_of_all_tables_and_those_not_run():
    planted = {"MLCD(b = +4)": 0.52}
    found = findings(by_arm(named_rows(lambda name: planted.get(name, 0.5)), UNSEEN), CONTRASTS)
    among = corrected({"one": found, "other": found, "empty": findings({}, CONTRASTS)})
    assert corrected({"one": found})["one"][0].p == pytest.approx(3 * found[0].p)
    assert among["one"][0].p == pytest.approx(9 * found[0].p)
    assert among["one"][0].difference == found[0].difference
    assert [each.verdict for each in among["empty"]] == ["not run"] * 3


def test_a_set_that_a_teacher_was_trained_on_is_none_of_unseen_classes():
    row = row_of(NAMED["MLCD"], 1, 0.5) | {"knn_cifar10_jpg": 0.9}
    assert value_of(row | {"teacher": "hog"}, UNSEEN) == pytest.approx(0.6)
    assert value_of(row | {"teacher": "resnet20"}, UNSEEN) == pytest.approx(0.5)


def packed(rng, shares):
    """Bits of every set, and the accuracies that they have."""
    bits = {name: rng.random(size) < shares[name] for name, size in FEW.items()}
    means = {f"knn_{name}": float(each.mean()) for name, each in bits.items()}
    return {"right": np.packbits(np.concatenate(list(bits.values()))).tobytes(), **means}


def test_intervals_over_images_cover_both_sources_of_chance():
    rng = np.random.default_rng(0)
    arm, num = NAMED["MLCD"], 8
    shares = dict.fromkeys(FEW, 0.5)
    ours, theirs = (
        [row_of(arm, seed, 0.5) | packed(rng, {n: s + more for n, s in shares.items()})
         for seed in range(num)]
        for more in (0.04, 0.0)
    )  # fmt: skip
    found = over_images(ours, theirs, FEW)
    # independent bits: the variance of a set's difference is 2 * 0.25 / (N S), of four sets / 4
    error = np.sqrt(2 * 0.25 / (400 * num) / len(ASKED))
    assert found.mean == pytest.approx(0.04, abs=3 * error)
    factor = t.ppf(0.975, num - 1)
    assert error < found.half_width / factor < 2 * error  # chance of an image in a seed: twice
    assert found.disagreement == pytest.approx(0.5, abs=0.03)
    same = over_images(ours, ours, FEW)
    assert (same.mean, same.half_width, same.disagreement) == (0, 0, 0)


def test_intervals_over_images_are_wider_than_those_over_few_seeds():
    rng = np.random.default_rng(0)
    arm, num = NAMED["MLCD"], 4
    ours, theirs = (
        [row_of(arm, seed, 0.5) | packed(rng, dict.fromkeys(FEW, 0.5 + 0.02 * rng.standard_normal()))
         for seed in range(num)]
        for _ in range(2)
    )  # fmt: skip
    of_seeds = paired_difference(
        *({row["seed"]: value_of(row, UNSEEN) for row in each} for each in (ours, theirs)),
        margin=0.005,
    )
    found = over_images(ours, theirs, FEW)
    assert found.mean == pytest.approx(of_seeds.mean)
    assert found.half_width > of_seeds.half_width


def test_what_depends_on_the_image_is_in_the_interval_though_seeds_agree():
    rng = np.random.default_rng(0)
    arm, num = NAMED["MLCD"], 6
    mine = row_of(arm, 0, 0.5) | packed(rng, dict.fromkeys(FEW, 0.6))
    other = row_of(arm, 0, 0.5) | packed(rng, dict.fromkeys(FEW, 0.4))
    ours, theirs = ([each | {"seed": seed} for seed in range(num)] for each in (mine, other))
    error = np.sqrt((0.6 * 0.4 + 0.4 * 0.6) / 400 / len(ASKED))
    found = over_images(ours, theirs, FEW)
    assert found.half_width == pytest.approx(t.ppf(0.975, num - 1) * error, rel=0.1)


def test_bits_that_are_not_those_of_the_accuracies_are_refused():
    row = row_of(NAMED["MLCD"], 1, 0.5) | packed(np.random.default_rng(0), dict.fromkeys(FEW, 0.5))
    assert right_bits([row], FEW)[ASKED[0]].shape == (1, 400)
    with pytest.raises(ArtifactInvalid, match="cifar10_jpg"):
        right_bits([row | {"knn_cifar10_jpg": 0.1}], FEW)


def on_a_curve(extra, bend=0.0):
    """Rows whose accuracy is that of their cosine alone, and `extra` of the form."""
    cosines = {"MLCD": 0.3, "MLCD(b = +4)": 0.1, "MLCD(b = -4)": 0.5, "MLCD(b = -6)": 0.57}
    cosines |= {"MLCD(b = -8)": 0.7}
    cosines |= {"MLC": 0.6, "CD": 0.65, "per_column": 0.6, "learned s and b": 0.6}
    rng = np.random.default_rng(0)
    rows = []
    for seed in range(1, 6):
        for name, arm in NAMED.items():
            cosine = cosines[name] + 0.001 * rng.standard_normal()
            accuracy = 0.5 + 0.1 * cosine - bend * (cosine - 0.4) ** 2 + extra.get(arm.kind, 0.0)
            rows.append(row_of(arm, seed, accuracy, cosine=cosine))
    return rows


def test_a_curve_is_not_read_off_below_itself():
    found = at_rest(on_a_curve({}, bend=1.0))
    # a straight line from 0.57 to 0.7 is up to 0.4 points below
    assert found.difference.mean == pytest.approx(0, abs=0.0005)
    assert reading_error(on_a_curve({})) == pytest.approx(0, abs=1e-9)
    assert reading_error(on_a_curve({}, bend=1.0)) > 0.0005
    assert reading_error([]) == 0


def test_at_one_resting_point_only_the_form_is_left():
    found = at_rest(on_a_curve({}))
    assert found.difference.mean == pytest.approx(0, abs=1e-9)
    assert (found.seeds, round(found.cosine, 2)) == (5, 0.6)
    found = at_rest(on_a_curve({"mlc": -0.01}))
    assert found.difference.mean == pytest.approx(0.01, abs=1e-9)


def test_nothing_is_read_beyond_the_biases_that_were_run():
    rows = [
        row | ({"positive_cosine": 0.9} if row["kind"] == "mlc" else {}) for row in on_a_curve({})
    ]
    assert at_rest(rows) is None


def test_the_surface_tells_the_place_from_the_form():
    rng = np.random.default_rng(0)

    def rows_with(extra):
        rows = []
        for arm in {arm.name: arm for arm in (*NAMED.values(), *sweeps())}.values():
            if arm.name not in resting_arms():
                continue
            cosine, other = rng.random(2)
            place = 0.1 * cosine - 0.05 * cosine**2 + 0.02 * np.log(arm.scale) * other
            value = 0.5 + place + extra.get(arm.kind, 0.0) + 1e-4 * rng.standard_normal()
            rows += [
                row_of(arm, seed, value, cosine=cosine) | {"negative_cosine": other}
                for seed in (1, 2, 3)
            ]
        return rows

    arms = resting_arms()
    nothing, form = (surface(rows_with(extra), arms) for extra in ({}, {"mlc": -0.02}))
    assert 1 > nothing.explained > nothing.left_out > 0.99 > nothing.by_cosines
    assert all(abs(mean) < 3 * width for mean, width in nothing.offsets.values())
    assert form.p < 1e-6
    mean, width = form.offsets["mlc"]
    assert mean == pytest.approx(-0.02, abs=max(width, 0.001))
    assert surface(rows_with({})[:24], arms) is None
    assert surface([row for row in rows_with({}) if row["seed"] < 3], arms) is None
    assert max(arm.scale for arm in arms.values()) == 32
    assert {arm.kind for arm in comparable_arms().values()} == {"mlc", "mlcd"}
    assert surface(rows_with({"mlc": -0.02}), comparable_arms()).p < 1e-6


def mosaic_rows(gain):
    rng = np.random.default_rng(0)
    rows = []
    for seed in range(1, 7):
        for objects in (1, 2, 4):
            places = {"purity": rng.random(), "conflict": rng.random(), "objects": objects}
            for name in ("CD", "MLCD", "MLC", "MLCD(4)", "MLCD(1)"):
                value = 0.4 + 1e-4 * rng.standard_normal()
                value += gain(places) if name == "MLCD" else 0.0
                tiles = {f"tiles_{each}": value for each in (1, 2, 4)}
                rows.append(row_of(MOSAIC_ARMS[name], seed, value, **places, **tiles))
    return rows


def test_mosaics_grow_with_the_objects_where_that_was_planted():
    rows = mosaic_rows(lambda places: 0.01 * np.log2(places["objects"]))
    found = trend(rows, "tiles")
    assert found.mean == pytest.approx(0.01, abs=0.0005)
    first = {objects: each[0].difference.mean for objects, each in by_objects(rows, UNSEEN).items()}
    assert first == pytest.approx({1: 0, 2: 0.01, 4: 0.02}, abs=5e-4)


def test_covariates_have_the_coefficients_that_were_planted():
    rows = mosaic_rows(lambda places: 0.02 * places["conflict"])
    purities = np.array([row["conflict"] for row in rows if row["arm"] == MOSAIC_ARMS["CD"].name])
    found = covariate_effects(rows, UNSEEN)
    assert found["conflict"].mean == pytest.approx(0.02 * purities.std(), abs=5e-4)
    assert abs(found["purity"].mean) < 3 * found["purity"].half_width
    assert covariate_effects(rows[:10], UNSEEN) is None


def test_least_squares_leaves_out_what_never_varies():
    x, noise = np.arange(10.0), np.random.default_rng(0).standard_normal(10)
    places = np.stack([x, np.ones(10)], axis=1)
    found = least_squares(places, 3 * x + 0.1 * noise, np.arange(10), ("x", "one"))
    assert found["x"].mean == pytest.approx(3 * x.std(), rel=0.05)
    assert list(found) == ["x"]


def test_what_differences_of_a_seed_share_widens_the_interval():
    rng = np.random.default_rng(0)
    seeds = np.repeat(np.arange(12), 9)
    shared = rng.standard_normal(12)[seeds]
    x = np.repeat(rng.standard_normal(12), 9)  # the same for all differences of a seed
    apart = least_squares(x[:, None], shared, np.arange(108), ("x",))
    clustered = least_squares(x[:, None], shared, seeds, ("x",))
    assert clustered["x"].mean == pytest.approx(apart["x"].mean)
    assert clustered["x"].half_width > 2 * apart["x"].half_width


def full_bits(rng, row):
    bits = [rng.random(size) < row[f"knn_{name}"] for name, size in SET_SIZES.items()]
    means = {f"knn_{n}": float(b.mean()) for n, b in zip(SET_SIZES, bits, strict=True)}
    return row | {"right": np.packbits(np.concatenate(bits)).tobytes()} | means


def written(results, tier, rows):
    pq.write_table(pa.Table.from_pylist(rows), table_of(tier, results))


def test_tables_are_made_of_the_rows_and_say_what_is_not_finished(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    rows = [full_bits(rng, row) for row in named_rows(lambda _: 0.5, range(1, 4), teacher="hog")]
    written(tmp_path, "frozen", rows)
    arms = {**TOWER_ARMS, **INSTANCE_ARMS}
    towers = [
        full_bits(rng, row_of(arm, seed, 0.4, teacher="none" if "instance" in arm.kind else "own"))
        for arm in arms.values()
        for seed in (1, 2, 3)
    ]
    written(tmp_path, "towers", towers)
    pairs = [
        {"run": f"pairs/{arm.name}/seed{seed}", "arm": arm.name, "seed": seed,
         "experiment": "pairs", "retrieval": 0.2, **ORIGIN,
         "loss": 1.5, "kind": arm.kind, "batch": arm.batch, "gradient_norms": [3.0] * 9 + [1.0]}
        for arm in pair_arms()
        for seed in (1, 2, 3)
    ]  # fmt: skip
    written(tmp_path, "scales", pairs)
    monkeypatch.setattr("sys.argv", ["verdict", "--results", str(tmp_path)])
    main()
    details = capsys.readouterr().out
    docs = tmp_path / "docs"
    shutil.copytree(DOCS / "explanation", docs / "explanation")
    monkeypatch.setattr(
        "sys.argv", ["verdict", "--results", str(tmp_path), "--write", "--docs", str(docs)]
    )
    main()
    picture = docs / "assets" / "validation-resting.svg"
    page = (docs / "explanation" / "validation.md").read_text()
    drawn = picture.read_bytes()
    assert "- frozen features, clusters of MobileNetV2: not finished" in page
    assert "- towers from pixels, clusters of its own first round: " in page
    assert "- towers from pixels, clusters of HOG: " not in page
    assert "| frozen: named hypotheses | 27 of 808 | 0 of 27 |" in page
    assert "**frozen, HOG**, 0 to 3 of 24 seeds" in details
    assert "**towers, its own first round**, 3 of 12 seeds" in details
    assert "| 32 | 20.0 | 20.0 |" in details
    assert "3.00 · 1.00" in details
    assert "Not run yet, or too few runs." in details
    main()
    assert (docs / "explanation" / "validation.md").read_text() == page
    assert picture.read_bytes() == drawn


def test_losses_are_compared_at_the_same_rate_and_length(tmp_path):
    rng = np.random.default_rng(0)
    ahead = {("rate", 1.0): 0.0, ("rate", 3.0): 0.02, ("steps", 900): -0.01}
    rows = [
        row_of(
            replace(NAMED[name], **{field: value}),
            seed,
            0.5 + (by if name == "MLCD" else 0.0) + 0.0005 * rng.standard_normal(),
            teacher="hog",
        )
        for (field, value), by in ahead.items()
        for name in ("MLCD", "MLC")
        for seed in range(1, 9)
    ]
    written(tmp_path, "frozen", rows)
    told = other_rates(AllRows.read(tmp_path)).splitlines()
    (line,) = (line for line in told if line.startswith("| HOG: MLCD - MLC |"))
    third, alike, faster, longer = line.strip("| ").split(" | ")[1:]
    assert third == "not run"
    assert abs(float(alike.strip("*").partition(" ")[0])) < 0.1
    assert float(faster.strip("*").partition(" ")[0]) == pytest.approx(2, abs=0.1)
    assert float(longer.strip("*").partition(" ")[0]) == pytest.approx(-1, abs=0.1)


def test_only_marked_blocks_are_filled():
    page = "a\n<!-- m: x -->\nold\n<!-- /m -->\nb\n"
    assert filled(page, {"x": lambda: "new"}, "m") == "a\n<!-- m: x -->\n\nnew\n\n<!-- /m -->\nb\n"
    with pytest.raises(KeyError):
        filled(page, {}, "m")
    assert table([["", "n"], ["a", "1"]]) == "|  | n |\n|---|---:|\n| a | 1 |"
