"""One step of a training on pairs.

The loss needs the embeddings of the whole batch. With several micro-batches they are computed
twice: first without gradients, for the loss and its gradient by each embedding, then again to
propagate that gradient through the towers (GradCache: Gao et al., 2021). The result is that of one
batch.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from mlcd.training.optim.clip import clip_global_norm
from mlcd.training.optim.schedule import set_learning_rate
from mlcd.training.pairs.pair_batches import PairBatch
from mlcd.training.pairs.pairs_config import PairsConfig
from mlcd.training.pairs.pairs_state import PairState
from mlcd.training.telemetry.step_meters import NotFinite, read_scalars


@dataclass(frozen=True)
class PairMeters:
    """The scalar tensors of one step, over all processes.

    Reading one waits for the device, so read them only to log them. values: mean cosine of pairs,
    and the step's scale and bias.
    """

    loss: Tensor
    values: dict[str, Tensor]
    grad_norm: Tensor
    lr: float

    @property
    def norms(self) -> dict[str, Tensor]:
        """Returns the loss and the gradient norm."""
        return {"loss": self.loss, "grad_norm": self.grad_norm}

    def to_dict(self) -> dict[str, float | None]:
        return {**read_scalars({"loss": self.loss, **self.values, **self.norms}), "lr": self.lr}


def pair_step(
    state: PairState, batches: Sequence[PairBatch], num_samples: int, config: PairsConfig
) -> PairMeters:
    """Updates `state` once from several micro-batches, without advancing `state.step`.

    num_samples: number of samples of all processes. Raises NotFinite, without updating.
    """
    lr = set_learning_rate(
        [state.optimizer], config.optim, step=state.step, num_steps=config.schedule.steps
    )
    # No sample of the step could be decoded.
    if not num_samples:
        nan = torch.tensor(math.nan)
        return PairMeters(nan, {}, nan, lr)
    loss, values = backward(state, batches, num_samples, config)
    trained = [parameter for _, parameter in state.iterate_trained()]
    max_norm = config.optim.clip_norm or float("inf")
    norm, _ = clip_global_norm(trained, [], max_norm, state.world)
    meters = PairMeters(loss, values, norm, lr)
    finite = torch.isfinite(loss) & torch.isfinite(norm)
    # The only value that the host reads. The maximum makes all processes decide alike.
    if bool(state.world.max(torch.where(finite, 0.0, 1.0))):
        state.optimizer.zero_grad(set_to_none=True)
        raise NotFinite(meters)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.clamp()
    state.average()
    return meters


def backward(
    state: PairState, batches: Sequence[PairBatch], num_samples: int, config: PairsConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sets the gradients of the global loss in all trained parameters; returns loss and meters.

    The gradients are the same on every process.
    """
    state.optimizer.zero_grad(set_to_none=True)
    if len(batches) == 1:
        (images,) = state.embed_images(batches, config)
        texts = state.embed_texts(batches[0])
        loss = state.loss(images, texts)
        loss.backward()
    else:
        images, texts = _embed_all(state, batches, config)
        loss = state.loss(images, texts)
        loss.backward()
        _propagate(state, batches, images, texts, config)
    for scalar in state.scalars.values():
        assert scalar.grad is not None
        scalar.grad = state.world.sum(scalar.grad) / state.world.size
    with torch.no_grad():
        sums = state.world.sum(torch.stack([loss.detach(), (images * texts).sum()]))
        scale = state.scalars["log_scale"].detach().exp()
    values = {"positive_cosine": sums[1] / num_samples, "scale": scale}
    if (bias := state.scalars.get("bias")) is not None:
        values["bias"] = bias.detach().clone()
    return sums[0] / state.world.size, values


@torch.no_grad()
def _embed_all(
    state: PairState, batches: Sequence[PairBatch], config: PairsConfig
) -> tuple[Tensor, Tensor]:
    """Returns the unit embeddings of all micro-batches, as leaves that collect gradients."""
    images = torch.cat(list(state.embed_images(batches, config)))
    texts = torch.cat([state.embed_texts(batch) for batch in batches])
    return images.requires_grad_(state.trains_images), texts.requires_grad_()


def _propagate(
    state: PairState,
    batches: Sequence[PairBatch],
    images: Tensor,
    texts: Tensor,
    config: PairsConfig,
) -> None:
    """Computes the embeddings again, and propagates their gradients through the towers."""
    assert texts.grad is not None
    sizes = [len(batch.ids) for batch in batches]
    text_gradients = texts.grad.split(sizes)
    image_gradients = () if images.grad is None else images.grad.split(sizes)
    embeddings = state.embed_images(batches, config)
    last = len(batches) - 1
    for index, batch in enumerate(batches):
        with nullcontext() if index == last else state.accumulating():
            rows, gradients = [state.embed_texts(batch)], [text_gradients[index]]
            if image_gradients:
                rows.append(next(embeddings))
                gradients.append(image_gradients[index])
            torch.autograd.backward(rows, gradients)
