"""Decodes JPEGs by NVIDIA's nvImageCodec: on a GPU, or on the CPU, which is of use for tests."""

import io
import os
from collections.abc import Sequence
from typing import Any

from PIL import Image

from mlcd.errors import ConfigInvalid
from mlcd.extras import install_command
from mlcd.images.decode import OpenedImage, open_image


def require_nvimgcodec() -> None:
    """Raises ConfigInvalid, with the install command, if the package is not installed."""
    _import_nvimgcodec()


class NvDecoder:
    """nvImageCodec's decoder of a GPU or of the CPU. Raises ConfigInvalid if it does not work."""

    def __init__(self, gpu: int | None, stream: int = 0) -> None:
        """gpu: index of the GPU; None decodes on the CPU. stream: handle of a CUDA stream."""
        codec = self._codec = _import_nvimgcodec()
        self.version: str = codec.__version__
        self._stream = stream
        if gpu is None:
            index, kinds = codec.NVIMGCODEC_DEVICE_CPU_ONLY, [codec.CPU_ONLY]
        else:
            index, kinds = gpu, [codec.HW_GPU_ONLY, codec.GPU_ONLY, codec.HYBRID_CPU_GPU]
        # Without load hints the image alone decides which kind decodes it, and so its pixels.
        backends = [
            codec.Backend(kind, load_hint_policy=codec.LoadHintPolicy.IGNORE) for kind in kinds
        ]
        self._params = codec.DecodeParams(apply_exif_orientation=False)
        place = "the CPU" if gpu is None else f"GPU {gpu}"
        sample = io.BytesIO()
        Image.new("RGB", (16, 16)).save(sample, "JPEG")
        try:
            self._decoder = codec.Decoder(device_id=index, backends=backends)
            (pixels,) = self.decode([open_image(sample.getvalue())])
        except RuntimeError as error:
            raise _unusable(f"decodes nothing on {place}: {error}") from error
        if pixels is None:
            raise _unusable(f"refuses a plain JPEG on {place}, as it does without nvJPEG")

    def decode(self, images: Sequence[OpenedImage]) -> list[Any | None]:
        """Returns pixels as nvImageCodec's arrays, uint8 [h, w, 3], on the device and not turned;
        None for an image that is refused.
        """
        arrays: list[Any | None] = [None] * len(images)
        streams = {}
        for place, image in enumerate(images):
            try:
                code = self._codec.CodeStream(image.data)
                size = code.width, code.height  # read from the header only here
            except RuntimeError:
                continue
            # Only Pillow's header was checked for the limits.
            if size == image.file.size:
                streams[place] = code
        decoded = self._decoder.decode(
            list(streams.values()), params=self._params, cuda_stream=self._stream
        )
        for place, pixels in zip(streams, decoded, strict=True):
            width, height = images[place].file.size
            if pixels is not None and tuple(pixels.shape) == (height, width, 3):
                arrays[place] = pixels
        return arrays


def _import_nvimgcodec() -> Any:
    """Returns the module. Raises ConfigInvalid if it is missing."""
    # Otherwise it prints lines about each image that it refuses, which the CPU then decodes.
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # noqa: TID251
    try:
        from nvidia import nvimgcodec
    except ImportError as error:
        raise _unusable("is not installed") from error
    return nvimgcodec


def _unusable(problem: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"data.decode=device needs nvImageCodec (nvidia-nvimgcodec), which {problem}",
        remedy=f"{install_command('train-gpu')}, or use data.decode=exact",
    )
