"""A later version joins a server that serves the earlier one."""

import asyncio
import contextlib
import shutil

import numpy as np
import pytest

from mlcd.encoders.triton import open_triton
from mlcd.errors import Unavailable
from mlcd.export.triton import export_triton
from mlcd.export.triton_config import TritonOptions
from tests.triton.conftest import SILENT, write_model

pytestmark = pytest.mark.triton


@pytest.mark.slow
async def test_a_later_version_is_loaded_without_a_failed_request(own_server, pictures, tmp_path):
    out = own_server.repository
    later = write_model(tmp_path / "later", seed=3)

    async def keep_asking(encoder, answers):
        while True:
            answers.append(await encoder.encode(pictures[:4], timeout_s=10))

    first = await open_triton(own_server.url, "tiny")
    answers: list[np.ndarray] = []
    load = asyncio.create_task(keep_asking(first, answers))
    options = TritonOptions("python", num_threads=1)
    await asyncio.to_thread(
        export_triton, str(later), out, name="tiny", version=2, options=options, reporter=SILENT
    )
    await asyncio.to_thread(own_server.load, "tiny")
    second = await open_triton(own_server.url, "tiny")
    rows = await second.encode(pictures[:4], timeout_s=10)
    num_before = len(answers)
    await asyncio.sleep(1)
    assert not load.done(), load.exception()
    load.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await load
    assert len(answers) > num_before
    assert (first.version, second.version) == (1, 2)
    assert first.up
    assert first.fingerprint != second.fingerprint
    for answer in answers:
        assert answer == pytest.approx(answers[0], abs=1e-5)
    assert np.abs(rows - answers[0]).max() > 0.01
    for encoder in (first, second):
        await encoder.close()


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
