"""Triton's ensemble of a model and the exact scan of its centers: rows and labels in one call.

`mlcd export --format triton --centers` writes the ensemble.
"""

import asyncio
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.grpc.aio import InferenceServerClient

from mlcd.encoders.triton import CHANNEL, translate_answer
from mlcd.encoders.unit_rows import unit_or_zero
from mlcd.errors import MlcdError, Unavailable
from mlcd.types import Embeddings, Fingerprint, ImageBatch

SUFFIX: Final = "-labeled"
_MICROSECONDS: Final = 1_000_000
_DTYPES: Final = {"embedding": np.float32, "ids": np.int32, "similarity": np.float64}


class EmbeddedWithLabels(NamedTuple):
    """The unit rows [N, D] of images, and the ids and float64 similarities [N, L] of their nearest
    centers, best first.
    """

    embeddings: Embeddings
    ids: NDArray[np.int32]
    similarities: NDArray[np.float64]


class LabeledEnsemble:
    """The ensemble of one version of a model.

    centers: digest of its centers.
    """

    def __init__(
        self, client: InferenceServerClient, url: str, name: str, version: int, centers: str
    ) -> None:
        self._client, self._url, self._name, self._version = client, url, name, version
        self.centers = centers

    async def label(
        self, images: ImageBatch, *, timeout_s: float, traceparent: str | None
    ) -> EmbeddedWithLabels:
        """Embeds and labels uint8 [N, 3, S, S], N at most the model's batch size.

        Raises the errors of `TritonEncoder.encode`.
        """
        pixels = InferInput("image_u8", list(images.shape), "UINT8")
        pixels.set_data_from_numpy(np.ascontiguousarray(images))
        request = self._client.infer(
            self._name,
            [pixels],
            model_version=str(self._version),
            outputs=[InferRequestedOutput(name) for name in _DTYPES],
            timeout=max(1, int(timeout_s * _MICROSECONDS)),
            client_timeout=timeout_s,
            headers=None if traceparent is None else {"traceparent": traceparent},
        )
        answer = await translate_answer(request, self._url, self._name, self._version)
        outputs = {name: answer.as_numpy(name) for name in _DTYPES}
        for name, dtype in _DTYPES.items():
            output = outputs[name]
            if output is None or output.dtype != dtype or output.shape[:1] != (len(images),):
                raise Unavailable(
                    f"Triton's model {self._name} returned a shape or type unlike its configuration"
                )
        return EmbeddedWithLabels(
            unit_or_zero(outputs["embedding"]), outputs["ids"], outputs["similarity"]
        )

    async def close(self) -> None:
        await self._client.close()


async def open_labels(
    url: str, model: str, version: int, fingerprint: Fingerprint, *, timeout_s: float = 5.0
) -> LabeledEnsemble | None:
    """Opens the ensemble of a model's version; returns None unless Triton has one with this
    fingerprint.
    """
    name, client = model + SUFFIX, InferenceServerClient(url, channel_args=CHANNEL)
    request = client.get_model_config(name, str(version), client_timeout=timeout_s)
    try:
        config = (await translate_answer(request, url, name, version)).config
    except (MlcdError, asyncio.CancelledError) as error:
        await client.close()
        if isinstance(error, MlcdError):
            return None
        raise
    parameters = {key: parameter.string_value for key, parameter in config.parameters.items()}
    centers = parameters.get(f"centers.{version}")
    if centers is None or parameters.get(f"fingerprint.{version}") != fingerprint:
        await client.close()
        return None
    return LabeledEnsemble(client, url, name, version, centers)
