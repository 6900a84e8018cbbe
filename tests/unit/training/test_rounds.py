"""Rounds that could only fail after hours are refused before the first."""

import pytest

from mlcd.errors import ConfigInvalid
from mlcd.progress import Reporter
from mlcd.training.rounds import run_rounds


@pytest.mark.parametrize(
    ("overrides", "clusters", "named"),
    [
        (
            ("loss.labels_per_image=4",),
            4,
            "--clusters must be more than the 4 labels per image, got 4",
        ),
        (
            ("loss.labels_per_image=2", "loss.drawn_from=3"),
            3,
            "--clusters must be more than the 3 labels",
        ),
    ],
)
def test_what_the_second_round_could_not_begin_with(config, overrides, clusters, named):
    with pytest.raises(ConfigInvalid, match=named):
        next(run_rounds(config("run", *overrides), 2, clusters, Reporter("silent")))
