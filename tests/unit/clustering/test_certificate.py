import numpy as np
import pytest
import torch

from mlcd.clustering.certificate import Slack, lowered, raised
from mlcd.clustering.nearest import CenterScan
from mlcd.types import unit_rows

pytestmark = pytest.mark.plain_cpu


@pytest.mark.parametrize("name", ["numpy", "torch-fp32", "torch-bf16", "torch-int8"])
def test_the_bound_holds_for_every_product(name):
    """The certificate's inequality itself, on adversarially rounded inputs."""
    generator = np.random.default_rng(0)
    z = unit_rows(generator.standard_normal((40, 256)) * generator.uniform(0.01, 1, (40, 256)))
    centers = unit_rows(generator.standard_normal((512, 256)) ** 3)
    exact = z.astype(np.float64) @ centers.astype(np.float64).T
    way = CenterScan(centers, matmul=name)._way
    product = np.asarray(torch.as_tensor(way.matmul.multiply(way.matmul.load(z), 0, 512)).double())
    slack = Slack.of(z, way.matmul, way.norms).with_each(np.tile(np.arange(512), (40, 1)))
    assert (exact <= raised(product, way.matmul.rounding.output) + slack).all()
    assert (exact >= lowered(product, way.matmul.rounding.output) - slack).all()
