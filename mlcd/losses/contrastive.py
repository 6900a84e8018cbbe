"""Instance discrimination: CLIP's softmax (Eq. 1, both directions) and SigLIP's sigmoid over the
global batch.

Each process passes its own pairs and gets a loss whose average over processes is the loss of the
global batch. So averaged gradients, as under DDP, are those of one process that holds the whole
batch; this includes the scalars. (With open_clip's defaults they are 1/W of it for the towers, and
not for the scale.)

Logits are computed in chunks of rows, and again in the backward pass, so that there are never more
than `CHUNK_ENTRIES` of them.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid
from torch.utils.checkpoint import checkpoint

from mlcd.world import World

CHUNK_ENTRIES: Final = 1 << 22  # logits held at once: 16 MiB in float32
_ALONE: Final = World()


def clip_loss(
    images_BD: Tensor,
    texts_BD: Tensor,
    scale: Tensor,
    *,
    world: World = _ALONE,
    counts: Sequence[int] | None = None,
) -> Tensor:
    """Computes the symmetric cross-entropy of scale * <image, text> over the batch of all
    processes.

    images_BD, texts_BD: unit rows, pair by pair. scale: the temperature's inverse, exp(tau), a
    scalar tensor. counts: the pairs of each process; None asks them.
    """
    images_BD, texts_BD, scale = _at_least_float32(images_BD, texts_BD, scale)
    with torch.autocast(images_BD.device.type, enabled=False):
        counts = counts or world.row_counts(len(images_BD), images_BD.device)
        all_images = world.gather_rows(images_BD, counts)
        all_texts = world.gather_rows(texts_BD, counts)
        targets = _own_columns(images_BD, counts, world)
        of_images = _sum_in_chunks(_softmax_losses, images_BD, all_texts, targets, scale)
        of_texts = _sum_in_chunks(_softmax_losses, texts_BD, all_images, targets, scale)
        return (of_images + of_texts) / 2 * (world.size / all_images.shape[0])


def siglip_loss(
    images_BD: Tensor,
    texts_BD: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    world: World = _ALONE,
    counts: Sequence[int] | None = None,
) -> Tensor:
    """Computes -sum_ab log sigmoid(y_ab (scale * <image_a, text_b> + bias)) / B over the batch of
    all processes.

    y is +1 for pairs and -1 otherwise (Zhai et al., ICCV 2023). The arguments are those of
    `clip_loss`; bias is a scalar tensor.
    """
    images_BD, texts_BD, scale, bias = _at_least_float32(images_BD, texts_BD, scale, bias)
    with torch.autocast(images_BD.device.type, enabled=False):
        counts = counts or world.row_counts(len(images_BD), images_BD.device)
        all_texts = world.gather_rows(texts_BD, counts)
        targets = _own_columns(images_BD, counts, world)
        total = _sum_in_chunks(_sigmoid_losses, images_BD, all_texts, targets, scale, bias)
        return total * (world.size / all_texts.shape[0])


def _softmax_losses(rows_RD: Tensor, others_BD: Tensor, targets_R: Tensor, scale: Tensor) -> Tensor:
    return cross_entropy(scale * rows_RD @ others_BD.T, targets_R, reduction="sum")


def _sigmoid_losses(
    rows_RD: Tensor, others_BD: Tensor, targets_R: Tensor, scale: Tensor, bias: Tensor
) -> Tensor:
    logits = scale * rows_RD @ others_BD.T + bias
    signs = -torch.ones_like(logits)
    signs[torch.arange(len(logits), device=targets_R.device), targets_R] = 1.0
    return -logsigmoid(signs * logits).sum()


def _sum_in_chunks(
    losses: Callable[..., Tensor], rows: Tensor, columns: Tensor, targets: Tensor, *scalars: Tensor
) -> Tensor:
    """Sums the losses of all rows, whose logits with all others live in one chunk at a time."""
    size = max(1, CHUNK_ENTRIES // max(1, len(columns)))
    if len(rows) <= size:
        return losses(rows, columns, targets, *scalars)
    total = rows.new_zeros(())
    for chunk, chunk_targets in zip(rows.split(size), targets.split(size), strict=True):
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


def _own_columns(rows: Tensor, counts: Sequence[int], world: World) -> Tensor:
    """Returns the columns of this process's own pairs in the gathered batch."""
    return sum(counts[: world.rank]) + torch.arange(rows.shape[0], device=rows.device)


def _at_least_float32(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.float() for tensor in tensors)
