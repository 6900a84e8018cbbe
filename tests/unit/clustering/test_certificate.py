import numpy as np
import pytest
import torch

from mlcd.clustering.certificate import Slack
from mlcd.clustering.nearest import CenterScan
from mlcd.types import unit_rows

pytestmark = pytest.mark.plain_cpu


def hard_cases():
    """name, rows, centers: what rounding and the shift may lose."""
    generator = np.random.default_rng(0)
    z = unit_rows(generator.standard_normal((40, 256)) * generator.uniform(0.01, 1, (40, 256)))
    centers = unit_rows(generator.standard_normal((520, 256)) ** 3)
    one = np.zeros(256)
    one[7] = 1.0
    yield "components of all sizes", z, centers
    yield "a narrow cone", unit_rows(z + 5 * one), unit_rows(centers + 5 * one)
    yield "a mean a thousand times as long", z + 1000 * one, centers + 1000 * one
    yield "rows far from the mean of the centers", unit_rows(z - 5 * one), unit_rows(centers + one)
    # Rounding to whole steps leaves out all but the first component, and the others add up to a score.
    small = np.append(1.0, np.full(255, 0.499 / 127))
    others = np.append(0.0, np.ones(255))
    yield "centers along what rows lose", small[None], np.stack([others, -others])
    yield "rows along what centers lose", np.stack([others, -others]), np.stack([small, -small])
    yield "duplicates of one center", z, np.repeat(centers[:1], 520, axis=0)
    yield "no mean", z, np.concatenate([centers[:260], -centers[:260]])
    scales = np.array([0.0, 1e-41, 1e-20, 1e-3, 1e3])
    yield "rows of any length, and zero", z * np.repeat(scales, 8)[:, None], centers
    yield "centers of any length, and zero", z, centers * np.repeat(scales, 104)[:, None]


@pytest.mark.parametrize("name", ["numpy", "torch-int8"])
@pytest.mark.parametrize("case", list(hard_cases()), ids=lambda case: case[0])
def test_the_bound_holds_for_every_product(name, case):
    """The certificate's inequality itself, on adversarially rounded inputs."""
    z, centers = (rows.astype(np.float32) for rows in case[1:])
    exact = z.astype(np.longdouble) @ centers.astype(np.longdouble).T
    way = CenterScan(centers, matmul=name)._way.scan
    rows = way.matmul.load(z)
    product = np.asarray(
        torch.as_tensor(way.matmul.multiply(rows.data, 0, len(centers))).double()
    ).astype(np.longdouble)
    slack = Slack.of(rows, way.matmul.rounding, way.norms)
    of_row, of_center = np.divmod(np.arange(exact.size), len(centers))
    bound = slack.of_pairs(of_row, of_center).reshape(exact.shape)
    assert (bound <= slack.max_error[:, None] * (1 + 1e-15)).all()
    # What a score exceeds the offset by is what the product is of.
    shifted = exact - slack.offset[:, None]
    assert (np.abs(shifted - product) <= bound).all()
    single = z @ centers.T
    assert (np.abs(single - exact) <= slack.single()[:, None]).all()


def test_a_common_mean_does_not_widen_the_bound():
    generator = np.random.default_rng(0)
    z, centers = generator.standard_normal((2, 300, 64)) / 8
    one = np.zeros(64)
    one[0] = 3.0
    widths = []
    for mean in (0 * one, one):
        centers_there = (centers + mean).astype(np.float32)
        way = CenterScan(centers_there, matmul="torch-int8")._way.scan
        rows = way.matmul.load((z + mean).astype(np.float32))
        slack = Slack.of(rows, way.matmul.rounding, way.norms).max_error
        widths.append(slack.mean())
    assert widths[1] < 1.1 * widths[0]


@pytest.mark.parametrize(("component", "has_room"), [(2.0**60, True), (2.0**62, False)])
def test_nothing_is_bounded_where_the_product_with_the_shift_has_no_room(component, has_room):
    """Equal centers are all at their mean, so that only the mean is long."""
    way = CenterScan(np.full((4, 16), component, np.float32), matmul="torch-int8")._way.scan
    rows = way.matmul.load(np.ones((2, 16), dtype=np.float32))
    slack = Slack.of(rows, way.matmul.rounding, way.norms)
    assert way.norms.largest_rounded == 0
    assert slack.holds().tolist() == [has_room] * 2
