"""Instance discrimination: CLIP's softmax (Eq. 1, both directions) and SigLIP's sigmoid over the
global batch.

Each process passes its own pairs. The average of the returned losses over the W processes is the
loss of the global batch, so gradients averaged by DDP equal those of one process with the whole
batch, for the scalars too. (With open_clip's defaults, the gradients of the towers are 1/W of this,
and that of the scale is not.)

Logits are computed in chunks of rows, and recomputed in the backward pass, so that memory never
holds more than `CHUNK_ENTRIES` of them.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid
from torch.utils.checkpoint import checkpoint

from mlcd.world import World

CHUNK_ENTRIES: Final = 1 << 22  # logits in memory at once: 16 MiB in float32
_SINGLE_PROCESS: Final = World()


def clip_loss(
    images_BD: Tensor,
    texts_BD: Tensor,
    scale: Tensor,
    *,
    world: World = _SINGLE_PROCESS,
    counts: Sequence[int] | None = None,
) -> Tensor:
    """Computes the symmetric cross-entropy of scale * <image, text> over the batch of all
    processes.

    images_BD, texts_BD: unit rows; row i of both is pair i. scale: inverse temperature exp(tau), a
    scalar tensor. counts: number of pairs per process; None gathers the counts.
    """
    images_BD, texts_BD, scale = _promote_to_float32(images_BD, texts_BD, scale)
    with torch.autocast(images_BD.device.type, enabled=False):
        counts = counts or world.row_counts(len(images_BD), images_BD.device)
        all_images = world.gather_rows(images_BD, counts)
        all_texts = world.gather_rows(texts_BD, counts)
        targets = _target_columns(images_BD, counts, world)
        image_loss = _sum_in_chunks(_softmax_losses, images_BD, all_texts, targets, scale)
        text_loss = _sum_in_chunks(_softmax_losses, texts_BD, all_images, targets, scale)
        return (image_loss + text_loss) / 2 * (world.size / all_images.shape[0])


def siglip_loss(
    images_BD: Tensor,
    texts_BD: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    world: World = _SINGLE_PROCESS,
    counts: Sequence[int] | None = None,
) -> Tensor:
    """Computes -sum_ab log sigmoid(y_ab (scale * <image_a, text_b> + bias)) / B over the batch of
    all processes.

    y is +1 for pairs and -1 otherwise (Zhai et al., ICCV 2023). bias: scalar tensor. Other
    arguments: see `clip_loss`.
    """
    images_BD, texts_BD, scale, bias = _promote_to_float32(images_BD, texts_BD, scale, bias)
    with torch.autocast(images_BD.device.type, enabled=False):
        counts = counts or world.row_counts(len(images_BD), images_BD.device)
        all_texts = world.gather_rows(texts_BD, counts)
        targets = _target_columns(images_BD, counts, world)
        total = _sum_in_chunks(_sigmoid_losses, images_BD, all_texts, targets, scale, bias)
        return total * (world.size / all_texts.shape[0])


def _softmax_losses(
    rows_RD: Tensor, columns_BD: Tensor, targets_R: Tensor, scale: Tensor
) -> Tensor:
    return cross_entropy(scale * rows_RD @ columns_BD.T, targets_R, reduction="sum")


def _sigmoid_losses(
    rows_RD: Tensor, columns_BD: Tensor, targets_R: Tensor, scale: Tensor, bias: Tensor
) -> Tensor:
    logits = scale * rows_RD @ columns_BD.T + bias
    signs = -torch.ones_like(logits)
    signs[torch.arange(len(logits), device=targets_R.device), targets_R] = 1.0
    return -logsigmoid(signs * logits).sum()


def _sum_in_chunks(
    losses: Callable[..., Tensor], rows: Tensor, columns: Tensor, targets: Tensor, *scalars: Tensor
) -> Tensor:
    """Sums the losses of all rows, with the logits of one chunk of rows in memory at a time."""
    chunk_rows = max(1, CHUNK_ENTRIES // max(1, len(columns)))
    if len(rows) <= chunk_rows:
        return losses(rows, columns, targets, *scalars)
    total = rows.new_zeros(())
    for chunk, chunk_targets in zip(rows.split(chunk_rows), targets.split(chunk_rows), strict=True):
        total = total + checkpoint(
            losses,
            chunk,
            columns,
            chunk_targets,
            *scalars,
            use_reentrant=False,
            preserve_rng_state=False,
        )
    return total


def _target_columns(rows: Tensor, counts: Sequence[int], world: World) -> Tensor:
    """Returns the index of each of this process's pairs in the gathered batch, [R]."""
    return sum(counts[: world.rank]) + torch.arange(rows.shape[0], device=rows.device)


def _promote_to_float32(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.float() for tensor in tensors)
