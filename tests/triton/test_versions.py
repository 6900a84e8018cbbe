"""A later version joins a server that serves the earlier one."""

import shutil

import pytest

from mlcd.encoders.triton import open_triton
from mlcd.errors import Unavailable
from mlcd.export.triton import export_triton
from mlcd.export.triton_config import TritonOptions
from tests.triton.conftest import SILENT, write_model

pytestmark = pytest.mark.triton


async def test_an_earlier_version_may_be_taken_away(own_server, pictures, tmp_path):
    """config.pbtxt still names it: Triton serves the rest."""
    out = own_server.repository
    export_triton(
        str(write_model(tmp_path / "later", seed=3)),
        out,
        name="tiny",
        version=2,
        options=TritonOptions("python", num_threads=1),
        reporter=SILENT,
    )
    shutil.rmtree(out / "tiny" / "1")
    own_server.load("tiny")
    encoder = await open_triton(own_server.url, "tiny")
    assert encoder.version == 2
    assert len(await encoder.encode(pictures[:4], timeout_s=10)) == 4
    await encoder.close()
    with pytest.raises(Unavailable, match="version 1 of the model tiny is not loaded"):
        await open_triton(own_server.url, "tiny", version=1)
