"""The text tower in the real server: its rows, its tokenizer, its health."""

import contextlib
import shutil

import numpy as np
import pytest

from mlcd.encoders import open_text_encoder
from mlcd.encoders.triton import open_triton, open_triton_text
from mlcd.errors import ArtifactInvalid, DeadlineExceeded, InvalidInput, Unavailable
from tests.triton.test_encoder import seconds_until

pytestmark = pytest.mark.triton
TEXTS = ["a", "", "a photo of the cat", "two dogs and an old man in the red sky by a dog", "a cat"]


@contextlib.asynccontextmanager
async def opened(server, folder, **options):
    encoder = await open_triton_text(server.url, "pair", folder, **options)
    try:
        yield encoder
    finally:
        await encoder.close()


@pytest.fixture
def folder(repository):
    return repository / "pair-text" / "1"


async def test_rows_are_those_of_the_embedded_engine(server, folder, two_tower_model):
    embedded = open_text_encoder(str(two_tower_model))
    ids = embedded.tokenizer(TEXTS * 20)

    images = await open_triton(server.url, "pair")
    await images.close()
    async with opened(server, folder) as encoder:
        assert encoder.fingerprint == images.fingerprint == embedded.fingerprint
        assert (encoder.name, encoder.version, encoder.engine) == ("pair", 1, "triton")
        assert encoder.calibration == embedded.calibration
        assert (encoder.dimension, encoder.precision) == (32, "fp32")
        assert np.array_equal(encoder.tokenizer(TEXTS * 20), ids)
        assert (await encoder.encode(ids[:0], timeout_s=10)).shape == (0, 32)
        rows, alone = (
            await encoder.encode(ids, timeout_s=10),
            await encoder.encode(ids[3:4], timeout_s=10),
        )
    assert rows.dtype == np.float32
    assert rows == pytest.approx(embedded.encode(ids), abs=1e-5)
    assert alone == pytest.approx(rows[3:4], abs=1e-6)


async def test_another_tokenizer_is_refused(server, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / "tokenizer.json"
    path.write_text(path.read_text().replace("dogs", "cogs"))
    with pytest.raises(ArtifactInvalid, match="is not the tokenizer of Triton's model pair-text"):
        await open_triton_text(server.url, "pair", tmp_path / "copy")


async def test_a_model_of_images_alone_has_no_texts_there(server, folder):
    with pytest.raises(Unavailable, match="tiny-text is not loaded"):
        await open_triton_text(server.url, "tiny", folder)


async def test_errors_are_those_of_images(server, folder):
    async with opened(server, folder) as encoder:
        ids = encoder.tokenizer(["a"])
        with pytest.raises(InvalidInput, match="token ids"):
            await encoder.encode(ids.astype(np.int32), timeout_s=10)
        with pytest.raises(DeadlineExceeded):
            await encoder.encode(ids, timeout_s=0)
        server.unload("pair-text")
        try:
            with pytest.raises(Unavailable, match="pair-text is not loaded"):
                await encoder.encode(ids, timeout_s=10)
        finally:
            server.load("pair-text")
        await seconds_until(lambda: encoder.up, 15)
        assert (await encoder.encode(ids, timeout_s=10)).any()
