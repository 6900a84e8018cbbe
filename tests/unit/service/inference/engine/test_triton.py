"""Images to Triton, each a request of its own; against the real Triton in tests/triton."""

import pytest

from mlcd.errors import ConfigInvalid
from service.settings import read_settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engine": "triton"}, "MLCD_ENGINE: engine triton and mlcd_triton__url go together only"),
        ({"triton": {"url": "127.0.0.1:8001"}}, "go together only"),
        (
            {"engine": "triton", "triton": {"url": "127.0.0.1:8001"}, "precision": "int8"},
            "precision int8 is not for engine triton",
        ),
        (
            {"engine": "triton", "triton": {"url": "127.0.0.1:8001", "version": 0}},
            "MLCD_TRITON__VERSION",
        ),
    ],
)
def test_triton_is_meant_and_somewhere(given, message):
    with pytest.raises(ConfigInvalid, match=message):
        read_settings({"model": "tiny", **given})
