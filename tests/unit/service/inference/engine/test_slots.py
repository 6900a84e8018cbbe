import os

import numpy as np
import pytest

from mlcd.service.inference.engine.slots import NUM_SLOTS, Slots
from mlcd.service.inference.served import ItemLayout


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 5, 5), np.uint8), ((7,), np.int64), ((1,), np.int64)]
)
@pytest.mark.parametrize("dimension", [1, 3, 8])
def test_both_processes_see_the_same_items_and_rows(shape, dtype, dimension):
    descriptor = os.memfd_create("test")
    try:
        given = {"max_batch": 3, "item": ItemLayout(shape, np.dtype(dtype)), "dimension": dimension}
        ours, theirs = Slots(descriptor, **given), Slots(descriptor, **given)
    finally:
        os.close(descriptor)
    assert ours.items.shape == (NUM_SLOTS, 3, *shape)
    assert ours.items.flags.aligned
    assert ours.rows.flags.aligned
    ours.items[:] = np.arange(ours.items.size).reshape(ours.items.shape) % 100
    theirs.rows[:] = -1.5
    assert np.array_equal(theirs.items, ours.items)
    assert (ours.rows == -1.5).all()
