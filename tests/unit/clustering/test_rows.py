import numpy as np
import pytest

from mlcd.clustering.rows import ArrayRows, FileRows, SelectedRows, UnitRows, lowest_hashed
from mlcd.errors import ArtifactInvalid, InvalidInput
from mlcd.randomness import permutation
from mlcd.types import unit_rows

ROWS = unit_rows(np.random.default_rng(0).standard_normal((20_000, 4)))


def in_files(folder, dtype=np.float32):
    paths = []
    for part, bounds in enumerate([(0, 3), (3, 12_000), (12_000, 20_000)]):
        paths.append(folder / f"{part}.npy")
        np.save(paths[-1], ROWS[slice(*bounds)].astype(dtype))
    return FileRows(paths)


@pytest.fixture(params=["one array", "several", "files", "selected"])
def rows(request, tmp_path):
    if request.param == "files":
        return in_files(tmp_path)
    if request.param == "selected":
        doubled = np.repeat(ROWS, 2, axis=0)
        return SelectedRows(ArrayRows([doubled]), np.arange(0, 40_000, 2))
    return ArrayRows(
        [ROWS] if request.param == "one array" else [ROWS[:5], ROWS[5:5], ROWS[5:9000], ROWS[9000:]]
    )


@pytest.mark.parametrize(("start", "stop"), [(0, 20_000), (2, 12_001), (3, 3), (11_999, 12_000)])
def test_blocks_give_every_row_once_and_in_order(rows, start, stop):
    assert (rows.num_rows, rows.dimension) == ROWS.shape
    found = list(rows.blocks(start, stop))
    assert (
        np.concatenate([ROWS[:0], *(block for _, block in found)]).tobytes()
        == ROWS[start:stop].tobytes()
    )
    position = start
    for first, block in found:
        assert first == position
        assert 0 < len(block) <= 8192
        position += len(block)


def test_rows_are_read_by_number_in_any_order(rows):
    wanted = np.array([19_999, 0, 2, 3, 11_999, 12_000, 2, 7, 5_000])
    assert rows.read(wanted).tobytes() == ROWS[wanted].tobytes()
    dense = np.arange(11_000, 13_000)[::-1].copy()
    assert rows.read(dense).tobytes() == ROWS[dense].tobytes()


def test_rows_of_a_file_with_more_than_2_to_the_31_numbers(tmp_path):
    """Positions do not fit 32 bits; the file is sparse but for its last rows."""
    num_rows, dimension = 2**19 + 3, 4096
    values = np.lib.format.open_memmap(
        tmp_path / "sparse.npy", "w+", np.float32, (num_rows, dimension)
    )
    last = np.random.default_rng(0).standard_normal((3, dimension), dtype=np.float32)
    values[-3:] = last
    del values
    rows = FileRows([tmp_path / "sparse.npy"])
    assert rows.read(np.array([num_rows - 1, num_rows - 3])).tobytes() == last[[2, 0]].tobytes()
    assert (
        rows.read(np.array([num_rows - 1, 5])).tobytes()
        == np.stack([last[2], np.zeros_like(last[0])]).tobytes()
    )
    [(first, block)] = rows.blocks(num_rows - 3, num_rows)
    assert (first, block.tobytes()) == (num_rows - 3, last.tobytes())


def test_a_file_cut_short_while_it_is_read_is_named(tmp_path):
    rows = in_files(tmp_path)
    (tmp_path / "2.npy").write_bytes((tmp_path / "2.npy").read_bytes()[:-8])
    with pytest.raises(ArtifactInvalid, match=r"2\.npy has been cut short"):
        rows.read(np.array([12_000, 19_999]))


def test_float16_files_are_widened_and_other_files_refused(tmp_path):
    assert in_files(tmp_path, np.float16).read(np.array([4]))[0] == pytest.approx(ROWS[4], abs=1e-3)
    np.save(tmp_path / "whole.npy", np.arange(6).reshape(2, 3))
    with pytest.raises(ArtifactInvalid, match=r"whole\.npy"):
        FileRows([tmp_path / "whole.npy"])


@pytest.mark.parametrize(
    ("value", "why"), [(np.nan, "NaN or Inf"), (-np.inf, "NaN or Inf"), (0, "no direction")]
)
def test_a_row_without_direction_is_named(value, why):
    broken = ROWS.copy()
    broken[9000] = value
    with pytest.raises(InvalidInput, match=f"row 9000 .*{why}"):
        list(UnitRows(ArrayRows([broken])).blocks(0, 20_000))
    # By its number in the input, also when only some rows are taken.
    with pytest.raises(InvalidInput, match="row 9000 "):
        UnitRows(SelectedRows(ArrayRows([broken]), np.array([1, 9000]))).read(np.array([1]))


def test_rows_are_made_unit_and_the_mean_is_subtracted_first():
    longer = ROWS[:10] * np.float32(3)
    mean = np.float32([0.1, 0, 0, 0.2])
    [(_, block)] = UnitRows(ArrayRows([longer])).blocks(0, 10)
    assert np.linalg.norm(block, axis=1) == pytest.approx(np.ones(10), abs=1e-6)
    [(_, block)] = UnitRows(ArrayRows([ROWS[:10]]), mean).blocks(0, 10)
    assert block == pytest.approx(unit_rows(ROWS[:10] - mean), abs=1e-7)
    with pytest.raises(InvalidInput, match="row 3 has no direction"):
        list(UnitRows(ArrayRows([ROWS[:10]]), ROWS[3]).blocks(0, 10))


@pytest.mark.parametrize("num_wanted", [0, 1, 17, 4999, 5000, 9999])
def test_the_lowest_hashed_rows_are_the_start_of_the_permutation(num_wanted):
    assert (lowest_hashed(5000, num_wanted, 7) == permutation(5000, 7)[:num_wanted]).all()


@pytest.mark.parametrize("wanted", [slice(0, 12_000), slice(11_990, 12_000)])
def test_a_file_that_is_cut_short_while_it_is_read_is_named(tmp_path, wanted):
    rows = in_files(tmp_path)
    with (tmp_path / "1.npy").open("r+b") as file:
        file.truncate(1000)
    for read in (
        lambda: rows.read(np.arange(12_000)[wanted]),
        lambda: list(rows.blocks(wanted.start, wanted.stop)),
    ):
        with pytest.raises(ArtifactInvalid, match=r"1\.npy has been cut short"):
            read()


def test_rows_of_float16_are_made_unit_to_float32s_precision():
    stored = unit_rows(np.random.default_rng(0).standard_normal((500, 64))).astype(np.float16)
    read = UnitRows(ArrayRows([stored])).read(np.arange(500))
    assert np.abs(np.linalg.norm(read.astype(np.float64), axis=1) - 1).max() < 1e-6
    exact = unit_rows(stored.astype(np.float32))
    assert UnitRows(ArrayRows([exact])).read(np.arange(500)).tobytes() == exact.tobytes()


@pytest.mark.parametrize("length", [1e-25, 1e20, 1e-40])
def test_a_row_of_any_length_has_a_direction(length):
    rows = np.float32([[1, 0], [3 * length, 4 * length]])
    assert UnitRows(ArrayRows([rows])).read(np.array([1]))[0] == pytest.approx([0.6, 0.8], abs=1e-4)
