"""The engine torch: CUDA GPUs in fp32 or bf16, and CPUs where OpenVINO is not installed.

On a GPU each batch size of a short list is recorded once as a CUDA graph, so that one call starts
the many small kernels of a transformer; a batch is padded to the next size. A larger batch is split
into parts, of which the last is padded. The host copies a part's pixels, and reads its rows, while
the GPU computes another part.
"""

import threading
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeGuard, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from mlcd.artifacts.manifest import open_artifact
from mlcd.cores import available_cores, cpu_features
from mlcd.cuda_graphs import Recordings
from mlcd.encoders.encoder import Precision
from mlcd.encoders.local_text import LocalTextEncoder, TextPart
from mlcd.encoders.options import DEFAULTS, EncoderOptions
from mlcd.encoders.unit_rows import MAX_BATCH, check_batch, encode_in_parts, unit_or_zero
from mlcd.errors import ArtifactInvalid, ConfigInvalid, Unavailable
from mlcd.images.transform import PreprocessSpec
from mlcd.models.blocks import MLP
from mlcd.models.servable import WEIGHTS, Servable
from mlcd.models.servable_text import ServableText
from mlcd.types import Embeddings, Fingerprint, ImageBatch, TokenBatch, model_name

# On an H200, ViT-B/32 computes 1.4 times as many images per second with batches of 256 as of 32.
CUDA_BATCH: Final = 256
# A job's batch has several parts, because the host's work on the first and the last is not hidden:
# 1.2 times as many images per second as with one.
_JOB_PARTS: Final = 4
BUCKETS: Final = (1, 2, 4, 8, 16, MAX_BATCH, 64, 128, CUDA_BATCH)

_MIDDLE: Final = 128  # of the values of a pixel
# The second batch of another size makes torch compile for all sizes; one image has code of its own.
_TRIED_BATCHES: Final = (3, 2, 1)
_LEAST_COSINE: Final = 0.999  # of rows in bf16 before and after their blocks are compiled


def cuda_available() -> bool:
    return torch.cuda.is_available()


class TorchEncoder:
    """The `Encoder` protocol over a trained model in torch, on the first GPU or on the CPU."""

    engine = "torch"

    def __init__(
        self,
        model: Servable,
        *,
        name: str,
        fingerprint: Fingerprint,
        preprocess: PreprocessSpec,
        precision: Precision = "fp32",
        num_threads: int = 0,
        device: str | None = None,
    ) -> None:
        """num_threads: number of threads; 0 means one per core that the process may use. device:
        None selects the GPU if there is one.

        Changes the model's weights in place: bf16 rounds the weights of matrix products, and on a
        GPU also scales them (`MLP.fold_quick_gelu`).
        """
        torch_device = torch.device(device or ("cuda" if cuda_available() else "cpu"))
        self.name, self.fingerprint, self.preprocess = name, fingerprint, preprocess
        self.precision: str = precision
        self.dimension = model.trunk.config.output_dim
        forward = _prepare(model, torch_device, precision, num_threads)
        self._on_gpu = torch_device.type == "cuda"
        # the best batch size for jobs
        self.job_batch = _JOB_PARTS * CUDA_BATCH if self._on_gpu else MAX_BATCH
        with _translate_errors():
            self._engine: Callable[[ImageBatch], NDArray[np.float32]] | None = (
                _Graphs(forward, preprocess.crop, self.dimension)
                if self._on_gpu
                else forward.on_cpu
            )
        self._lock = threading.Lock()

    def encode(self, images: ImageBatch) -> Embeddings:
        crop = self.preprocess.crop
        if self._on_gpu:
            check_batch(images, crop)
            return self._run(images)
        return encode_in_parts(images, self._run, crop=crop, dimension=self.dimension)

    def _run(self, images: ImageBatch) -> NDArray[np.float32]:
        with self._lock, _translate_errors():
            if self._engine is None:
                raise Unavailable("the encoder is closed", remedy="open the model again")
            return self._engine(images)

    def close(self) -> None:
        with self._lock:
            self._engine = None


def open_model_artifact(path: Path, options: EncoderOptions = DEFAULTS) -> TorchEncoder:
    """Opens a model of `mlcd export`; it needs weights, config and preprocessing, not the graph."""
    artifact = open_artifact(path, "model")
    if artifact.fingerprint is None:
        raise ArtifactInvalid(f"{path} lacks a fingerprint", remedy="export the model again")
    model = Servable.read(artifact.file(WEIGHTS).parent)
    return TorchEncoder(
        model,
        name=model_name(artifact.config.get("name")),
        fingerprint=artifact.fingerprint,
        preprocess=model.preprocess,
        precision=options.precision,
        num_threads=options.num_threads,
    )


def open_text(
    part: TextPart, options: EncoderOptions = DEFAULTS, *, device: str | None = None
) -> LocalTextEncoder:
    """Opens the text part of a model artifact; it needs the weights, not the graph.

    device: see `TorchEncoder`.
    """
    model = ServableText.read(part.folder)
    tower = _TextTower(model, options.precision, options.num_threads, device)
    return LocalTextEncoder(
        part, tower.run, tower.close, engine="torch", precision=options.precision
    )


class _TextTower:
    """A text tower on the first GPU or on the CPU, which computes one batch at a time."""

    def __init__(
        self, model: nn.Module, precision: Precision, num_threads: int, device: str | None
    ) -> None:
        self._device = torch.device(device or ("cuda" if cuda_available() else "cpu"))
        self._forward: _Forward | None = _prepare(model, self._device, precision, num_threads)
        self._lock = threading.Lock()

    def run(self, ids: TokenBatch) -> NDArray[np.float32]:
        with self._lock, _translate_errors():
            if self._forward is None:
                raise Unavailable("the encoder is closed", remedy="open the model again")
            return self._forward(torch.tensor(ids, device=self._device)).cpu().numpy()

    def close(self) -> None:
        with self._lock:
            self._forward = None


class _Forward:
    """Computes unit rows on the device.

    Products are in the requested precision. Norms and the residual stream are in fp32, except that
    an image tower in bf16 on a GPU has its residual stream in bf16 too.
    """

    def __init__(self, model: nn.Module, device: torch.device, precision: Precision) -> None:
        self.model, self.device, self.precision = model, device, precision

    def __call__(self, batch: Tensor) -> Tensor:
        # The weights are already rounded, so autocast's cache is useless; in a recording it is
        # forbidden.
        bf16 = torch.autocast(
            self.device.type,
            dtype=torch.bfloat16,
            enabled=self.precision == "bf16",
            cache_enabled=False,
        )
        with torch.inference_mode():
            if _is_all_bf16(self.model):
                embedding = self.model.trunk(batch)
                return functional.normalize(embedding.float(), dim=1)
            with bf16:
                rows: Tensor = self.model(batch)
                return rows

    def on_cpu(self, images: ImageBatch) -> NDArray[np.float32]:
        # A copy, because from_numpy needs a writable array.
        return self(torch.tensor(images)).numpy()


def _prepare(
    model: nn.Module, device: torch.device, precision: Precision, num_threads: int
) -> _Forward:
    """Rounds a model to the precision, in place, and moves it to the device."""
    _check_precision(precision, device)
    with _translate_errors():
        model.eval().requires_grad_(requires_grad=False)
        forward = _Forward(model, device, precision)
        if precision == "bf16":
            if device.type == "cuda":
                fold_activations(model)
            if device.type == "cuda" and isinstance(model, Servable):
                fold_pixels(model)
                model.trunk.to(torch.bfloat16)
            else:
                round_matmul_weights(model)
        model.to(device)
        if _is_all_bf16(model):
            compile_blocks(model, forward)
    if device.type == "cpu":
        torch.set_num_threads(num_threads or available_cores())
    return forward


class _Slot:
    """The buffers for one part: its pixels on host and GPU, and its rows on the host.

    Host memory is pinned, so that copies are asynchronous.
    """

    def __init__(self, crop: int, dimension: int, device: torch.device) -> None:
        shape = (CUDA_BATCH, 3, crop, crop)
        self.pinned = torch.zeros(shape, dtype=torch.uint8, pin_memory=True)
        self.pixels = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.rows = torch.zeros((CUDA_BATCH, dimension), pin_memory=True)
        self.copied, self.done = torch.cuda.Event(), torch.cuda.Event()

    def fill(self, images: ImageBatch) -> None:
        """Copies images into pinned memory, once the previous part of this slot is done."""
        self.done.synchronize()
        pinned, images = self.pinned[: len(images)], np.ascontiguousarray(images)
        if images.flags.writeable:  # torch copies with several threads, and warns if not writable
            pinned.copy_(torch.from_numpy(images))
        else:
            pinned.numpy()[...] = images

    def unit_rows(self, num: int) -> Embeddings:
        """Returns the rows of the part, once the GPU has computed them."""
        self.done.synchronize()
        return unit_or_zero(self.rows[:num].numpy())


class _Graphs:
    """Computes unit rows with one CUDA graph per bucket.

    Parts alternate between two slots: while the GPU computes one, the host fills the other and a
    second stream copies it.
    """

    def __init__(self, forward: _Forward, crop: int, dimension: int) -> None:
        self._forward, self._dimension = forward, dimension
        self._slots = [_Slot(crop, dimension, forward.device) for _ in range(2)]
        self._copies = torch.cuda.Stream(forward.device)
        # the input of all graphs
        self._pixels = torch.zeros_like(self._slots[0].pixels)
        # The current stream zeroes the slots' memory; the copy stream must wait for it.
        self._copies.wait_stream(torch.cuda.current_stream(forward.device))
        self._recordings = Recordings[int, Tensor](forward.device)
        self._max_part = CUDA_BATCH

    def __call__(self, images: ImageBatch) -> Embeddings:
        while True:
            try:
                return self._encode_in_parts(images)
            except torch.cuda.OutOfMemoryError:
                if self._max_part == MAX_BATCH or len(images) <= self._max_part // 2:
                    raise
            self._max_part //= 2
            torch.cuda.synchronize(self._forward.device)  # waits for copies of the failed part
            self._recordings.forget(lambda bucket: bucket > self._max_part)
            torch.cuda.empty_cache()

    def _encode_in_parts(self, images: ImageBatch) -> Embeddings:
        rows = np.empty((len(images), self._dimension), np.float32)
        in_flight: list[tuple[int, _Slot]] = []
        for index, start in enumerate(range(0, len(images), self._max_part)):
            slot = self._slots[index % 2]
            if len(in_flight) == 2:
                self._read_rows(rows, *in_flight.pop(0))
            part = images[start : start + self._max_part]
            slot.fill(part)
            self._start(slot, len(part))
            in_flight.append((start, slot))
        for start, slot in in_flight:
            self._read_rows(rows, start, slot)
        return rows

    def _start(self, slot: _Slot, num: int) -> None:
        """Queues a part's copy to the GPU, its computation and the copy of its rows; returns
        without waiting.
        """
        compute = torch.cuda.current_stream(self._forward.device)
        with torch.cuda.stream(self._copies):
            slot.pixels[:num].copy_(slot.pinned[:num], non_blocking=True)
            slot.copied.record(self._copies)
        compute.wait_event(slot.copied)
        # The padding contains pixels of an earlier batch; its rows are computed and discarded, and
        # rows do not affect each other.
        self._pixels[:num].copy_(slot.pixels[:num])
        rows = self._compute(BUCKETS[bisect_left(BUCKETS, num)])
        slot.rows[:num].copy_(rows[:num], non_blocking=True)
        slot.done.record(compute)

    def _read_rows(self, rows: Embeddings, start: int, slot: _Slot) -> None:
        num = min(self._max_part, len(rows) - start)
        rows[start : start + num] = slot.unit_rows(num)

    def _compute(self, bucket: int) -> Tensor:
        return self._recordings.run(bucket, lambda: self._forward(self._pixels[:bucket]))


def fold_activations(model: nn.Module) -> None:
    """Folds each quick_gelu into one kernel, in place; see `MLP.fold_quick_gelu`."""
    for module in model.modules():
        if isinstance(module, MLP):
            module.fold_quick_gelu()


class _PixelPatches(nn.Module):
    """The patches of a tower from uint8 pixels [B, 3, H, W] to [B, W, h, w], as one matrix product.

    Its weights absorb the normalization of pixels. A pixel less 128 is exact in bfloat16.
    """

    def __init__(self, model: Servable) -> None:
        super().__init__()
        weight = model.trunk.patch.weight
        self._side = weight.shape[2]
        self._product = nn.Linear(weight[0].numel(), len(weight))
        self._product.weight.data = (weight / (255 * model.std)).flatten(1)
        self._product.bias.data = (weight * ((_MIDDLE / 255 - model.mean) / model.std)).sum(
            (1, 2, 3)
        )

    def forward(self, image_u8: Tensor) -> Tensor:
        side = self._side
        grid = (image_u8.shape[2] // side, image_u8.shape[3] // side)
        patches = image_u8.unflatten(3, (grid[1], side)).unflatten(2, (grid[0], side))
        # converted and reordered in one copy
        patches = patches.permute(0, 2, 4, 1, 3, 5).to(
            self._product.weight.dtype, memory_format=torch.contiguous_format
        )
        rows_BTW = self._product(patches.sub_(_MIDDLE).flatten(3).flatten(1, 2))
        patches_BWhw: Tensor = rows_BTW.transpose(1, 2).unflatten(2, grid)
        return patches_BWhw


def fold_pixels(model: Servable) -> None:
    """Makes the trunk take raw pixels, in place. It replaces the normalization, in float32, and a
    convolution, for whose three input channels cuDNN has no fast kernel.
    """
    model.trunk.register_module("patch", _PixelPatches(model))


def compile_blocks(model: Servable, forward: Callable[[Tensor], Tensor]) -> None:
    """Compiles the tower's blocks, in place, so that fewer kernels read and write its activations.

    forward: computes rows from uint8 images. Without a compiler, or if a row changes, the blocks
    stay as they are, with a warning.
    """
    crop, blocks = model.preprocess.crop, model.trunk.blocks
    generator = torch.Generator().manual_seed(0)
    shape = (max(_TRIED_BATCHES), 3, crop, crop)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    images = images.to(model.mean.device)
    expected = forward(images)
    compiled = (cast(nn.Module, torch.compile(block)) for block in blocks)
    model.trunk.blocks = nn.ModuleList(compiled)
    try:
        rows = [(forward(images[:num]), expected[:num]) for num in _TRIED_BATCHES]
        cosines = torch.cat([(after * before).sum(dim=1) for after, before in rows])
        reason = None if cosines.min() > _LEAST_COSINE else "the rows change"
    except Exception as error:  # noqa: BLE001 - from a compiler, the driver or the disk
        reason = str(error).strip().partition("\n")[0]
    if reason is not None:
        model.trunk.blocks = blocks
        warnings.warn(
            f"running without compiled blocks, which is slower: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_all_bf16(model: nn.Module) -> TypeGuard[Servable]:
    """Tells whether a whole image tower is in bf16, not only its products."""
    return isinstance(model, Servable) and model.trunk.norm_post.weight.dtype == torch.bfloat16


def round_matmul_weights(model: nn.Module) -> None:
    """Rounds the weights of layers that autocast would run in bf16: this halves their memory and
    saves a cast per call.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.to(torch.bfloat16)


def _check_precision(precision: Precision, device: torch.device) -> None:
    if precision == "fp32":
        return
    if precision == "int8":
        raise ConfigInvalid("int8 needs the engine openvino, got torch")
    if device.type == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ConfigInvalid(
                "bf16 needs a GPU with bf16 instructions", remedy="use precision fp32"
            )
    elif not computes_bf16():
        raise ConfigInvalid("bf16 needs a CPU with bf16 instructions", remedy="use precision fp32")


def computes_bf16() -> bool:
    """Tells whether the CPU has bf16 and oneDNN may use it (ONEDNN_MAX_CPU_ISA can forbid it)."""
    if not cpu_features() & {"AVX512_BF16", "AMX_BF16"}:
        return False
    # torch has no public function for this
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001
    return supported


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise Unavailable("the torch engine failed", remedy="the log says why") from error
