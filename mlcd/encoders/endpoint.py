"""The engine of a model that another server runs, behind an endpoint for embeddings.

The server's preprocessing follows ours, and its weights cannot be seen. What identifies the model
is the name that the user gives, together with its answers to 8 probe images and 8 probe texts.
"""

import hashlib
import io
import json
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from platformdirs import user_cache_path
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from mlcd.artifacts.disk import hold_lock, replacing, translate_os_errors
from mlcd.encoders.endpoint_client import EndpointClient, ItemsRejected
from mlcd.encoders.endpoint_forms import (
    DIALECTS,
    AnswerMalformed,
    EndpointAddress,
    ItemKind,
    read_rows,
    to_data_uri,
)
from mlcd.encoders.options import EncoderOptions
from mlcd.encoders.unit_rows import check_batch, unit_or_zero
from mlcd.errors import ArtifactInvalid, ConfigInvalid, InvalidInput, NoTextTower, Unavailable
from mlcd.images.transform import PreprocessSpec
from mlcd.types import Embeddings, Fingerprint, ImageBatch, TokenBatch

if TYPE_CHECKING:  # needs the package tokenizers, which images alone do not need
    from mlcd.encoders.text_encoder import Calibration
    from mlcd.models.tokenizer import Tokenizer

# Images per call of a job: a part of the identity of embeddings, so independent of `batch` and
# `parallel`, which users change while they find a good speed.
_JOB_BATCH: Final = 64
_ANSWER_BYTES: Final = 65_536  # of an answer, without its rows
_ROW_BYTES: Final = 2**19  # 16,384 numbers of 32 characters
# An endpoint that has not answered this client is more likely to be misspelled than to be away.
_FIRST_WAIT_S: Final = 30.0
_QUESTION_WAIT_S: Final = 4.0  # for the question whether it embeds texts: a server starts with it
# Answers to a probe vary with the other items of a batch, on a GPU in bf16 by about 0.0005.
_MIN_COSINE: Final = 0.999
_PNG_LEVEL: Final = 1  # a third of the time of the default, for files larger by a tenth
_OTHER_PNG_LEVEL: Final = 9  # gives other bytes for the same pixels
_CLIP_SCALE: Final = 100.0  # the factor of cosines that CLIP learned; an endpoint does not say its
_PROBE_TEXTS: Final = (
    "a photo of a dog",
    "a red car in the snow",
    "two people at a table",
    "the sea at night",
    "an invoice with a table of prices",
    "ein Fahrrad vor einem Haus",
    "一只猫坐在窗台上",
    "0123456789",
)


@dataclass(frozen=True)
class _Probed:
    """The unit rows of the probes, [8, D] of images, and [8, D] of texts or None."""

    images: Embeddings
    texts: Embeddings | None

    def fingerprint(self, address: EndpointAddress) -> Fingerprint:
        """Returns the digest of the address's name and size, of the dimension, and of the largest
        coordinate of each sum of rows.

        A sum, because noise moves the largest coordinate of a single row in one of 40 rows, if
        their cosine is 0.9999. Two models of one name and dimension that agree in these coordinates
        have one fingerprint: only the record on this machine tells them apart.
        """
        facts = ["endpoint-1", address.dialect, address.name, address.size, self.images.shape[1]]
        for rows in (self.images, self.texts):
            if rows is not None:
                total = rows.sum(axis=0, dtype=np.float64)
                largest = int(np.abs(total).argmax())
                facts += [largest, bool(total[largest] > 0)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


class _Endpoint:
    """One kind of items of an endpoint: embeds them in parallel requests, and checks the answers.

    After an outage, and when it is opened, the endpoint is asked for its probes again. A server
    that is replaced between two requests, without a failure in between, is noticed at the next
    opening.
    """

    def __init__(self, address: EndpointAddress, kind: ItemKind, options: EncoderOptions) -> None:
        """Raises the errors of `open_endpoint`."""
        self.address, self._kind, self._dialect = address, kind, DIALECTS[address.dialect]
        self._batch = min(address.batch, self._dialect.max_items)
        wait_s = address.wait_s
        if options.endpoint_wait_s is not None:
            wait_s = min(wait_s, options.endpoint_wait_s)
        self._client = EndpointClient(
            address, wait_s=wait_s, first_wait_s=min(wait_s, _FIRST_WAIT_S)
        )
        self._threads = ThreadPoolExecutor(address.parallel, thread_name_prefix="endpoint")
        # a model of `mlcd.load_model` is not closed, but forgotten
        self._close = weakref.finalize(self, _close, self._client, self._threads)
        self._checking = threading.Lock()
        self._checked_outages = 0
        try:
            self.probed, is_new = _read_or_record(address, self._probe)
            self._require_kind()
            if not is_new:
                self._check_probes()
            self._checked_outages = self._client.outages
        except BaseException:
            self.close()
            raise

    def _require_kind(self) -> None:
        if self._kind == "text" and self.probed.texts is None:
            raise NoTextTower(str(self.address))

    @property
    def fingerprint(self) -> Fingerprint:
        return self.probed.fingerprint(self.address)

    @property
    def dimension(self) -> int:
        return int(self.probed.images.shape[1])

    def embed(self, items: Sequence[Callable[[], str]]) -> Embeddings:
        """Returns unit rows of the items, each made by a call: data-URIs or texts. An item that the
        endpoint refuses alone, or whose row is not finite, gets zeros.
        """
        starts = range(0, len(items), self._batch)
        parts = [items[start : start + self._batch] for start in starts]
        try:
            pending = [self._threads.submit(self._embed_part, part) for part in parts]
        except RuntimeError as error:
            raise Unavailable("the encoder is closed") from error
        try:
            rows = [future.result() for future in pending]
        except BaseException:
            for future in pending:
                future.cancel()
            raise
        return np.concatenate([np.empty((0, self.dimension), np.float32), *rows])

    def close(self) -> None:
        self._close()

    def _embed_part(self, items: Sequence[Callable[[], str]]) -> Embeddings:
        rows = self._embed_or_split([item() for item in items])
        # Not before the request, which is what ends an outage.
        if self._client.outages != self._checked_outages:
            with self._checking:
                if (outages := self._client.outages) != self._checked_outages:
                    self._check_probes()
                    self._checked_outages = outages
        return rows

    def _embed_or_split(self, contents: list[str]) -> Embeddings:
        try:
            return self._ask(self._kind, contents, self.dimension)
        except ItemsRejected:
            if len(contents) > 1:
                return np.concatenate([self._embed_or_split([content]) for content in contents])
        try:
            self._ask(self._kind, _make_probes(self._kind, self.address.size)[:1], self.dimension)
        except ItemsRejected as error:  # it refuses everything
            raise ConfigInvalid(error.message) from error
        return np.zeros((1, self.dimension), np.float32)

    def _ask(self, kind: ItemKind, contents: list[str], dimension: int | None) -> Embeddings:
        """Returns the unit rows of one request. dimension: None for any."""
        name, dialect = self.address.name, self._dialect
        make_body = dialect.image_body if kind == "image" else dialect.text_body
        max_bytes = _ANSWER_BYTES + _ROW_BYTES * len(contents)
        answer = self._client.post(dialect.path, make_body(name, contents), max_bytes=max_bytes)
        try:
            rows = read_rows(dialect, answer, len(contents))
        except AnswerMalformed as error:
            raise Unavailable(
                f"{self._client} answers with {error}", remedy="is it of this dialect?"
            ) from error
        if dimension is not None and rows.shape[1] != dimension:
            raise self._describe_drift(f"{rows.shape[1]} numbers, {dimension} before")
        return unit_or_zero(rows)

    def _ask_probes(self, kind: ItemKind, dimension: int | None) -> Embeddings:
        probes = _make_probes(kind, self.address.size)
        parts: list[Embeddings] = []
        for start in range(0, len(probes), self._batch):
            parts.append(self._ask(kind, probes[start : start + self._batch], dimension))
            dimension = parts[0].shape[1]
        return np.concatenate(parts)

    def _check_probes(self) -> None:
        """Raises ConfigInvalid if the probes have other rows than in the record."""
        recorded = self.probed.images if self._kind == "image" else self.probed.texts
        assert recorded is not None
        try:
            rows = self._ask_probes(self._kind, self.dimension)
        except ItemsRejected as error:
            raise self._describe_drift(error.message) from error
        cosine = float((rows * recorded).sum(axis=1).min())
        if cosine < _MIN_COSINE:
            raise self._describe_drift(f"a probe has the cosine {cosine:.4f} to its record")

    def _describe_drift(self, change: str) -> ConfigInvalid:
        return ConfigInvalid(
            f"the answers of {self.address} have drifted: another model is behind it ({change})",
            remedy="restore the model; or, to start anew with the present model, remove"
            f" {_record_path(self.address)}",
        )

    def _probe(self) -> _Probed:
        """Asks for the probes for the first time. Raises ConfigInvalid without images."""
        try:
            images = self._ask_probes("image", None)
            first = draw_probe_images(self.address.size)[0]
            reencoded = self._ask("image", [_write_png_uri(first, _OTHER_PNG_LEVEL)], None)
        except ItemsRejected as error:
            raise ConfigInvalid(
                f"a model must embed images: {error.message}",
                remedy=f"give such a model, and its dialect: {', '.join(DIALECTS)}",
            ) from error
        if not images.any(axis=1).all():
            raise ConfigInvalid(f"{self.address} must embed every probe image, got zeros or NaN")
        # A model of texts may accept data-URIs, and embed their characters.
        if float(reencoded[0] @ images[0]) < _MIN_COSINE:
            raise ConfigInvalid(
                f"{self.address} must embed pixels, but two files of the same pixels differ: it"
                " embeds their characters as text",
                remedy="give a model that embeds images",
            )
        if float((images @ images.T).min()) >= _MIN_COSINE:
            raise ConfigInvalid(f"{self.address} must embed images, got one row for all")
        try:
            texts = self._ask_probes("text", None)
        except (ItemsRejected, ConfigInvalid):
            return _Probed(images, None)
        if texts.shape != images.shape:
            raise ConfigInvalid(
                f"{self.address} must embed images and texts into one space, got dimensions"
                f" {images.shape[1]} and {texts.shape[1]}"
            )
        return _Probed(images, texts if texts.any(axis=1).all() else None)


class EndpointEncoder:
    """The `Encoder` protocol over an endpoint."""

    engine = "endpoint"
    # of our rows; the endpoint does not say in which precision it computes
    precision = "fp32"
    job_batch = _JOB_BATCH

    def __init__(self, endpoint: _Endpoint) -> None:
        self._endpoint, self.name = endpoint, _derive_name(endpoint.address)
        self.fingerprint, self.dimension = endpoint.fingerprint, endpoint.dimension
        self.preprocess = _make_preprocess(endpoint.address)

    def encode(self, images: ImageBatch) -> Embeddings:
        check_batch(images, self._endpoint.address.size)
        return self._endpoint.embed(
            [partial(_write_png_uri, image, _PNG_LEVEL) for image in images]
        )

    def close(self) -> None:
        self._endpoint.close()


class EndpointTextEncoder:
    """The `TextEncoder` protocol over an endpoint, which takes texts, not token ids."""

    engine, precision = "endpoint", "fp32"
    tokenizer: "Tokenizer"
    calibration: "Calibration"

    def __init__(self, endpoint: _Endpoint) -> None:
        from mlcd.encoders.text_encoder import Calibration
        from mlcd.models.text_as_ids import Utf8Tokenizer

        self._endpoint, self.name = endpoint, _derive_name(endpoint.address)
        self.fingerprint, self.dimension = endpoint.fingerprint, endpoint.dimension
        self.preprocess = _make_preprocess(endpoint.address)
        self.tokenizer, self.calibration = Utf8Tokenizer(), Calibration(_CLIP_SCALE)

    def encode(self, ids: TokenBatch) -> Embeddings:
        from mlcd.models.text_as_ids import CONTEXT_LENGTH, to_text

        if ids.dtype != np.int64 or ids.ndim != 2 or not 1 <= ids.shape[1] <= CONTEXT_LENGTH:
            raise InvalidInput(
                f"expected int64 token ids of shape [N, 1..{CONTEXT_LENGTH}], got {ids.dtype}"
                f" {list(ids.shape)}"
            )
        return self._endpoint.embed([partial(to_text, row) for row in ids])

    def close(self) -> None:
        self._endpoint.close()


def open_endpoint(spec: str, options: EncoderOptions) -> EndpointEncoder:
    """Opens the images of an endpoint, and asks for its probes.

    Raises ConfigInvalid for a bad address, for an endpoint that embeds no images, and if its
    answers have drifted since the first time on this machine; Unavailable if it is away.
    """
    return EndpointEncoder(_Endpoint(_parse(spec, options), "image", options))


def open_endpoint_text(spec: str, options: EncoderOptions) -> EndpointTextEncoder:
    """Opens the texts of an endpoint. Raises NoTextTower if it embeds only images, and the errors
    of `open_endpoint`.
    """
    return EndpointTextEncoder(_Endpoint(_parse(spec, options), "text", options))


def endpoint_has_text(spec: str) -> bool:
    """Tells whether an endpoint embeds texts, from its record; without one, asks it."""
    address = EndpointAddress.parse(spec)
    if (probed := _read_record(_record_path(address))) is None:
        options = EncoderOptions(endpoint_wait_s=_QUESTION_WAIT_S)
        with closing(_Endpoint(address, "image", options)) as endpoint:
            probed = endpoint.probed
    return probed.texts is not None


def _close(client: EndpointClient, threads: ThreadPoolExecutor) -> None:
    client.close()
    threads.shutdown(wait=False, cancel_futures=True)


def _parse(spec: str, options: EncoderOptions) -> EndpointAddress:
    if options.engine != "auto" or options.precision != "fp32":
        raise ConfigInvalid(
            f"an endpoint needs engine auto and precision fp32, got {options.engine} and"
            f" {options.precision}",
            remedy="leave out both: the endpoint's server chooses them",
        )
    return EndpointAddress.parse(spec)


def _make_preprocess(address: EndpointAddress) -> PreprocessSpec:
    return PreprocessSpec(address.size, address.size, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


def _derive_name(address: EndpointAddress) -> str:
    """Returns a valid name of a model from the last part of the endpoint's name."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", address.name.rpartition("/")[2]).strip(".-_")
    return name or "model"


def _record_path(address: EndpointAddress) -> Path:
    digest = hashlib.sha256(str(address).encode()).hexdigest()[:16]
    folder = user_cache_path("mlcd", appauthor=False) / "endpoints"
    return folder / f"{_derive_name(address)[:60]}-{digest}.safetensors"


def _read_or_record(address: EndpointAddress, probe: Callable[[], _Probed]) -> tuple[_Probed, bool]:
    """Returns the rows of the probes, and whether they were asked for now, for the first time."""
    path = _record_path(address)
    with translate_os_errors(path, remedy="name another cache with XDG_CACHE_HOME"):
        if (probed := _read_record(path)) is not None:
            return probed, False
        path.parent.mkdir(parents=True, exist_ok=True)
        # so that processes that start together agree
        with hold_lock(path.with_name(f".{path.name}.lock")):
            if (probed := _read_record(path)) is not None:
                return probed, False
            probed = probe()
            rows = {"images": probed.images}
            if probed.texts is not None:
                rows["texts"] = probed.texts
            with replacing(path) as temporary:
                save_file(rows, temporary, {"model": str(address)})
            return probed, True


def _read_record(path: Path) -> _Probed | None:
    if not path.is_file():
        return None
    try:
        rows = load_file(path)
        return _Probed(rows["images"], rows.get("texts"))
    except (KeyError, SafetensorError) as error:
        raise ArtifactInvalid(
            f"the record of an endpoint cannot be read: {path}", remedy="remove the file"
        ) from error


def _make_probes(kind: ItemKind, size: int) -> list[str]:
    if kind == "text":
        return [*_PROBE_TEXTS]
    return [_write_png_uri(image, _PNG_LEVEL) for image in draw_probe_images(size)]


def _write_png_uri(image: NDArray[np.uint8], level: int) -> str:
    """Returns uint8 [3, H, W] as a data-URI."""
    file = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(file, "PNG", compress_level=level)
    return to_data_uri(file.getvalue())


@cache
def draw_probe_images(size: int) -> NDArray[np.uint8]:
    """Returns the probe images, [8, 3, size, size]: gradients, stripes, shapes and noise."""
    y, x = np.mgrid[:size, :size]
    ramp_x, ramp_y = x * 255 // (size - 1), y * 255 // (size - 1)
    stripes, columns = (y * 8 // size) % 2 * 255, (x * 16 // size) % 2 * 255
    disc = ((2 * x - size) ** 2 + (2 * y - size) ** 2 < size**2 // 2) * 255
    blank = np.zeros_like(x)
    bytes_of_noise = hashlib.shake_256(b"mlcd probe").digest(3 * size * size)
    noise = np.frombuffer(bytes_of_noise, np.uint8).reshape(3, size, size)
    blocks = noise[:, y // 16, x // 16]
    planes: list[Any] = [
        [ramp_x, ramp_x, ramp_x],
        [ramp_y, blank, 255 - ramp_y],
        [stripes, stripes, blank],
        [columns ^ stripes, columns ^ stripes, columns ^ stripes],
        [disc, 255 - disc, blank + 64],
        [255 - blank, (x > y) * 255, blank + 32],
        noise,
        blocks,
    ]
    return np.array(planes, np.uint8)
