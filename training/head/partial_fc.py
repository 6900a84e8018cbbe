"""The classifier: up to a million class centers, sharded over processes; each step draws negatives.

From each process the loss needs only two log-sums per sample, over the negatives and the positives
that the process owns. Two all-reduces combine them, then softplus is applied once. Negatives are
computed in chunks, and again in the backward pass, so no [B, |S|] tensor is stored.

Shapes: B samples of the global batch, D dimension, K classes of this process, L labels per sample,
S drawn classes of this process, C drawn classes of a chunk, A classes of this process that a step
touches.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from mlcd.errors import ConfigInvalid
from mlcd.losses.discrimination import mlc_from_log_sums, mlcd_from_log_sums
from mlcd.losses.margins import MarginGrad, MarginKind, with_margin
from mlcd.losses.negatives import NegativePolicy, draw_negatives, own_slots
from mlcd.losses.positives import distinct_labels, num_distinct
from mlcd.randomness import Stream, hash_counters
from mlcd.training.head.loss_config import CenterUpdate, LossConfig, LossKind
from mlcd.training.head.products import add_product, product
from mlcd.training.head.row_gradients import distinct_rows, sparse_rows
from mlcd.training.head.shards import Shard
from mlcd.training.parallel.compute_config import Products
from mlcd.types import Embeddings
from mlcd.world import World

_INIT_DEVIATION: Final = 0.01  # the initialization of insightface and of the authors
_INIT_BLOCK: Final = 4096
CHUNK_ENTRIES: Final = 1 << 21  # logits in a chunk: 8 MiB in float32
# 128 MiB in float32. On a GPU small chunks are bound by kernel launches: with 2^21 a pass of 1,024
# samples over 10,000 drawn classes took 22 ms on an H200 with any type of products, against 7 ms
# with one chunk.
CUDA_CHUNK_ENTRIES: Final = 1 << 25


@dataclass(frozen=True)
class HeadConfig:
    """The settings of the loss; see `LossConfig` for their meaning."""

    kind: LossKind = "mlcd"
    scale: float = 64.0
    margin_kind: MarginKind = "arcface"
    margin: float = 0.3
    margin_grad: MarginGrad = "straight_through"
    learn_scale: bool = False
    bias: float = 0.0
    learn_bias: bool = False
    negative_ratio: float = 0.1
    policy: NegativePolicy = "independent"
    correct_ratio: bool = False
    filter_threshold: float | None = None
    center_update: CenterUpdate = "sparse"
    products: Products = "fp32"
    seed: int = 0

    @classmethod
    def of(cls, loss: LossConfig, num_classes: int, seed: int, products: Products = "fp32") -> Self:
        """Returns the settings of a head, with the defaults for this number of classes.

        products: compute.head_products.
        """
        fields = loss.model_dump(
            exclude={
                "labels_per_image",
                "drawn_from",
                "scale",
                "negative_ratio",
                "bias",
                "label_weights",
            }
        )
        return cls(
            **fields,
            products=products,
            scale=loss.resolve_scale(num_classes),
            negative_ratio=loss.resolve_ratio(num_classes),
            bias=loss.resolve_bias(num_classes),
            seed=seed,
        )


@dataclass(frozen=True)
class HeadOutput:
    """The result of a step.

    loss: mean over the global batch, the same on every process. meters: scalars without gradient.
    """

    loss: Tensor
    meters: dict[str, Tensor]


def check_first_centers(shape: tuple[int, ...], num_classes: int, dimension: int) -> None:
    """Raises ConfigInvalid unless centers of this shape can start a head."""
    num, center_dimension = shape
    if (num, center_dimension) != (num_classes, dimension):
        raise ConfigInvalid(
            f"the head must start from {num_classes} centers of dimension {dimension}, got {num} of"
            f" dimension {center_dimension}",
            remedy="start from random centers, or set model.embedding_dim to their dimension",
        )


class PartialFC(nn.Module):
    """The centers of this process's shard, [K, D], and the loss of the global batch against all
    centers.

    Each process computes the complete gradient of its `weight` (keep it out of DDP) and of a
    learned scale and bias. The gradient of the embeddings is scaled so that DDP's average over
    processes is the gradient of the global mean loss.
    """

    def __init__(
        self, num_classes: int, dimension: int, config: HeadConfig, *, world: World | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.world = world or World()
        self.shard = Shard.of(self.world.rank, self.world.size, num_classes)
        self.weight = nn.Parameter(torch.empty(len(self.shard), dimension))
        self._drawn: tuple[int, Tensor] | None = None  # (step, its drawn classes)
        # The logarithm is learned, so that the scale stays positive.
        self.log_scale = make_scalar(math.log(config.scale)) if config.learn_scale else None
        self.bias = make_scalar(config.bias) if config.learn_bias else None

    @property
    def scalars(self) -> dict[str, nn.Parameter]:
        """Returns the learned scale and bias by name, the same on every process."""
        parameters = {"log_scale": self.log_scale, "bias": self.bias}
        return {name: parameter for name, parameter in parameters.items() if parameter is not None}

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draws centers with standard deviation 0.01; they depend only on seed and class id."""
        first_seed = int(hash_counters(seed, Stream.CENTERS)[0])
        for block in range(self.shard.start // _INIT_BLOCK, -(-self.shard.stop // _INIT_BLOCK)):
            first = block * _INIT_BLOCK
            # torch uses the low 32 bits of a seed. Consecutive seeds differ for every block.
            generator = torch.Generator().manual_seed((first_seed + block) % 2**32)
            rows = (
                torch.randn((_INIT_BLOCK, self.weight.shape[1]), generator=generator)
                * _INIT_DEVIATION
            )
            start, stop = max(first, self.shard.start), min(first + _INIT_BLOCK, self.shard.stop)
            self.weight[start - self.shard.start : stop - self.shard.start] = rows[
                start - first : stop - first
            ]

    @torch.no_grad()
    def initialize_from(self, centers: Embeddings) -> None:
        """Starts from unit centers of the same dimension and number of classes, [K, D].

        Rows are scaled to the mean norm of random centers: only directions matter, and one update
        turns a row by about the learning rate over its norm.
        """
        dimension = self.weight.shape[1]
        check_first_centers(centers.shape, self.shard.num_classes, dimension)
        unit = torch.from_numpy(centers[self.shard.start : self.shard.stop])
        self.weight.copy_(unit * (_INIT_DEVIATION * math.sqrt(dimension)))

    def unit_centers(self) -> Tensor:
        """Returns this process's unit centers, float32 [K, D]."""
        return normalize(self.weight.detach().float(), dim=1)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        step: int,
        *,
        weights: Tensor | None = None,
        step_labels: Tensor | None = None,
        row_counts: Sequence[int] | None = None,
    ) -> HeadOutput:
        """Computes the loss of the global batch from this process's samples.

        embeddings: [B_local, D], not normalized. labels: int64 [B_local, L], -1 for none, valid for
        `check_labels`. weights: [B_local, L], label weights of at least 0; None for 1 each.
        step_labels: int64 [n, L], labels of all samples of the step, for negatives that depend on
        them; None if this is the only micro-batch. row_counts: number of samples of each process;
        None exchanges them.
        """
        with torch.autocast(embeddings.device.type, enabled=False):
            upcast = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
            counts = row_counts or self.world.row_counts(len(upcast), upcast.device)
            z_BD = self.world.gather_rows(normalize(upcast, dim=1), counts)
            columns = 1 if self.config.kind == "cd" else labels.shape[1]
            own_labels = distinct_labels(labels[:, :columns])
            labels_BL = self.world.gather_rows(own_labels, counts)
            step_labels_NL = (
                labels_BL if step_labels is None else distinct_labels(step_labels[:, :columns])
            )
            weights_BL = None
            if weights is not None:
                own_weights = weights[:, :columns].to(upcast.dtype)
                weights_BL = self.world.gather_rows(own_weights, counts)
            drawn_S = self._draw_negatives(step_labels_NL, step)
            sums = self._log_sums(z_BD, labels_BL, weights_BL, drawn_S)
            return self._finish(sums, labels_BL, step_labels_NL)

    def _draw_negatives(self, step_labels_NL: Tensor, step: int) -> Tensor:
        """Returns the drawn classes of a step that this process owns, ascending.

        If they do not depend on labels, they are cached for the step's other micro-batches.
        """
        if self.config.policy != "independent":
            return self._draw(step_labels_NL, step, self.config.policy)
        if self._drawn is None or self._drawn[0] != step:
            self._drawn = step, self._draw(step_labels_NL, step, "independent")
        return self._drawn[1]

    def _draw(self, step_labels_NL: Tensor, step: int, policy: NegativePolicy) -> Tensor:
        drawn_S = draw_negatives(
            self.shard.num_classes,
            self.config.negative_ratio,
            seed=self.config.seed,
            step=step,
            policy=policy,
            labels=step_labels_NL,
            device=step_labels_NL.device,
        )
        if len(drawn_S) == self.shard.num_classes:
            return drawn_S[self.shard.start : self.shard.stop]
        if len(self.shard) == self.shard.num_classes:
            return drawn_S
        # The host reads the range of this process's classes, as it decides the products' shapes.
        ends = torch.tensor([self.shard.start, self.shard.stop]).to(
            drawn_S.device, non_blocking=True
        )
        start, stop = torch.searchsorted(drawn_S, ends).tolist()
        return drawn_S[start:stop]

    def _scale_and_bias(self) -> tuple[float | Tensor, float | Tensor]:
        scale = self.config.scale if self.log_scale is None else self.log_scale.exp()
        return scale, self.config.bias if self.bias is None else self.bias

    def _log_sums(
        self, z_BD: Tensor, labels_BL: Tensor, weights_BL: Tensor | None, drawn_S: Tensor
    ) -> "_Sums":
        scale, _ = self._scale_and_bias()
        shard_loss = _ShardLoss(self.shard, replace(self.config, scale=_detach(scale)), self.world)
        lse_positive, lse_negative, cosine_sums, slopes = _log_sums(
            z_BD, self.weight, labels_BL, weights_BL, drawn_S, shard_loss
        )
        if torch.is_tensor(scale):
            # `change` is 0 and has gradient 1, so the slope becomes the gradient by the scale.
            change = scale - scale.detach()
            lse_positive = lse_positive + change * slopes[0]
            lse_negative = lse_negative + change * slopes[1]
        return _Sums(lse_positive, lse_negative, cosine_sums, self.shard.num_classes)

    def _scalar_meters(self) -> dict[str, Tensor]:
        meters = {name: parameter.detach().clone() for name, parameter in self.scalars.items()}
        if "log_scale" in meters:
            meters["scale"] = meters.pop("log_scale").exp()
        return meters

    def _finish(self, sums: "_Sums", labels_BL: Tensor, step_labels_NL: Tensor) -> HeadOutput:
        config = self.config
        lse_negative = (
            sums.correct_negative(labels_BL) if config.correct_ratio else sums.lse_negative
        )
        if config.kind == "mlcd":
            _, bias = self._scale_and_bias()
            losses = mlcd_from_log_sums(sums.lse_positive, lse_negative, bias=bias)
        else:
            losses = mlc_from_log_sums(sums.lse_positive, lse_negative)
        meters = sums.meters(labels_BL, step_labels_NL) | self._scalar_meters()
        return HeadOutput(losses.mean(), meters)


@dataclass(frozen=True)
class _Sums:
    """Sums reduced over processes.

    cosine_sums [B, 4]: for each sample the number of positives, the sum of their cosines, then the
    same of negatives.
    """

    lse_positive: Tensor
    lse_negative: Tensor
    cosine_sums: Tensor
    num_classes: int

    def correct_negative(self, labels_BL: Tensor) -> Tensor:
        """Returns LSEn + log(|all negatives| / |drawn negatives|), the expected log-sum of all
        negatives.
        """
        all_negatives = self.num_classes - (labels_BL >= 0).sum(dim=1)
        return self.lse_negative + torch.log(all_negatives / self.cosine_sums[:, 2].clamp_min(1))

    def meters(self, labels_BL: Tensor, step_labels_NL: Tensor) -> dict[str, Tensor]:
        lse_positive, lse_negative = self.lse_positive.detach(), self.lse_negative.detach()
        return _cosine_meters(self.cosine_sums, labels_BL, step_labels_NL) | {
            "lse_positive": _mean_of_present(lse_positive),
            "lse_negative": _mean_of_present(lse_negative),
            "sigma_positive": torch.sigmoid(lse_positive).mean(),
            "sigma_negative": torch.sigmoid(lse_negative).mean(),
        }


def _cosine_meters(
    cosine_sums: Tensor, labels_BL: Tensor, step_labels_NL: Tensor
) -> dict[str, Tensor]:
    positives, positive_cosines, negatives, negative_cosines = cosine_sums.sum(dim=0)
    return {
        "positive_cosine": positive_cosines / positives,
        "negative_cosine": negative_cosines / negatives,
        "unique_positives": num_distinct(step_labels_NL).float(),
        "effective_negatives": negatives / len(labels_BL),
    }


def _mean_of_present(log_sums: Tensor) -> Tensor:
    present = log_sums > -torch.inf
    return log_sums.masked_fill(~present, 0.0).sum() / present.sum()


def make_scalar(start: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(start))


def _detach(number: float | Tensor) -> float:
    """Returns the value without gradient; a tensor works in place of a number."""
    return number.detach() if torch.is_tensor(number) else number  # type: ignore[return-value]


@dataclass(frozen=True)
class _ShardLoss:
    """This process's part of the loss: its classes, and the settings with the current scale."""

    shard: Shard
    config: HeadConfig
    world: World


class _LogSums(torch.autograd.Function):
    """Computes (LSEp [B], LSEn [B], cosine_sums [B, 4], slopes [2, B]) over all processes' classes.

    LSEp is log sum_i w_i exp(-s_i). The log-sums are differentiable in z and the centers; slopes
    are their derivatives by the scale, 0 if the scale is not learned.
    """

    @staticmethod
    def forward(
        ctx: Any,
        z_BD: Tensor,
        centers_KD: Tensor,
        labels_BL: Tensor,
        weights_BL: Tensor | None,
        drawn_S: Tensor,
        shard_loss: "_ShardLoss",
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shard, config, world = shard_loss.shard, shard_loss.config, shard_loss.world
        local_BL = labels_BL - shard.start
        owned_BL = (labels_BL >= shard.start) & (labels_BL < shard.stop)
        cosine_BL = _positive_cosines(z_BD, centers_KD, local_BL, owned_BL)
        margin_cosine_BL, slope_BL = _apply_margin(cosine_BL, config)
        logit_BL = config.scale * margin_cosine_BL
        if weights_BL is not None:
            # w exp(-s) = exp(-(s - log w)); for weight 0 the logit is infinite.
            logit_BL = logit_BL - weights_BL.log()
        positive_max, positive_sum, positive_slope_sum = _sum_exponentials(
            (-logit_BL).masked_fill(~owned_BL, -torch.inf), -margin_cosine_BL
        )
        slots_BL = own_slots(drawn_S, labels_BL)
        negative_max = z_BD.new_full((z_BD.shape[0],), -torch.inf)
        negative_sum, negative_slope_sum, count_B, total_B = z_BD.new_zeros((4, z_BD.shape[0]))
        chunk = _choose_chunk(z_BD)
        for start in range(0, len(drawn_S), chunk):
            chunk_slice = slice(start, start + chunk)
            center_CD = normalize(
                centers_KD[drawn_S[chunk_slice] - shard.start].to(z_BD.dtype), dim=1
            )
            cosine_BC, absent_BC = _negative_cosines(z_BD, center_CD, slots_BL - start, config)
            total_B += cosine_BC.masked_fill(absent_BC, 0.0).sum(dim=1)
            count_B += cosine_BC.shape[1] - absent_BC.sum(dim=1)
            logits = (
                cosine_BC * config.scale if config.learn_scale else cosine_BC.mul_(config.scale)
            )
            logit_BC = logits.masked_fill_(absent_BC, -torch.inf)
            new_max = torch.maximum(negative_max, logit_BC.amax(dim=1))
            safe_max = _zero_if_empty(new_max)
            rescale = torch.exp(_subtract(negative_max, safe_max))
            exponential_BC = logit_BC.sub_(safe_max[:, None]).exp_()
            negative_sum = negative_sum * rescale
            negative_sum += exponential_BC.sum(dim=1)
            if config.learn_scale:
                negative_slope_sum = negative_slope_sum * rescale + (
                    exponential_BC * cosine_BC
                ).sum(dim=1)
            negative_max = new_max
        # There are two all-reduces: the maxima, then the sums rescaled to them, with the sums
        # for the meters.
        maxima = torch.stack([positive_max, negative_max])
        reduced_max = world.max(maxima)
        rescale = torch.exp(_subtract(maxima, _zero_if_empty(reduced_max)))
        cosine_sums = torch.stack(
            [
                owned_BL.sum(dim=1).to(z_BD.dtype),
                (cosine_BL * owned_BL).sum(dim=1),
                count_B,
                total_B,
            ]
        )
        rows = [torch.stack([positive_sum, negative_sum]) * rescale, cosine_sums]
        if config.learn_scale:
            rows.append(torch.stack([positive_slope_sum, negative_slope_sum]) * rescale)
        sums = world.sum(torch.cat(rows))
        lse_positive, lse_negative = (_zero_if_empty(reduced_max) + sums[:2].log()).unbind(0)
        cosine_sums_B4 = sums[2:6].T.contiguous()
        slopes = torch.zeros_like(sums[:2])
        if config.learn_scale:
            slopes = torch.where(sums[:2] > 0, sums[6:] / sums[:2], slopes)
        ctx.save_for_backward(
            z_BD,
            centers_KD,
            labels_BL,
            drawn_S,
            logit_BL,
            slope_BL,
            lse_positive,
            lse_negative,
            slots_BL,
        )
        ctx.shard_loss, ctx.chunk = shard_loss, chunk
        ctx.mark_non_differentiable(cosine_sums_B4, slopes)
        return lse_positive, lse_negative, cosine_sums_B4, slopes

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        *_, logit_BL, slope_BL, lse_positive, lse_negative, _ = ctx.saved_tensors
        d_positive, d_negative, scale = gradients[0], gradients[1], ctx.shard_loss.config.scale
        # dLSEn/ds_j = softmax(s)_j and ds_j/dcos = scale (method.md 2.8).
        factor_B1 = (d_negative * scale)[:, None]
        shift_B1 = _zero_if_empty(lse_negative)[:, None]
        # dLSEp/ds_i = -softmax(-s)_i, times the slope of the margin.
        sloped_softmax_BL = torch.exp(-logit_BL - _zero_if_empty(lse_positive)[:, None]) * slope_BL
        d_cosine_BL = -d_positive[:, None] * sloped_softmax_BL
        # Not under the caller's autocast.
        with torch.autocast(d_cosine_BL.device.type, enabled=False):
            gradients_of_inputs = _differentiate_rows(ctx, d_cosine_BL, factor_B1, shift_B1)
        return (*gradients_of_inputs, None, None, None, None)


def _differentiate_rows(
    ctx: Any, d_cosine_BL: Tensor, factor_B1: Tensor, shift_B1: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of z and of the centers.

    d_cosine_BL: derivatives of the loss by the cosines of positives. The derivatives by the cosines
    of negatives are factor exp(scale cosine - shift).
    """
    z_BD, centers_KD, labels_BL, drawn_S, *_, slots_BL = ctx.saved_tensors
    shard, config = ctx.shard_loss.shard, ctx.shard_loss.config
    local_BL = labels_BL - shard.start
    owned_BL = (labels_BL >= shard.start) & (labels_BL < shard.stop)
    d_cosine_BL = torch.where(owned_BL, d_cosine_BL, torch.zeros_like(d_cosine_BL))
    active_A = _list_touched(drawn_S - shard.start, local_BL, owned_BL, len(shard))
    d_center_AD = torch.zeros((len(active_A), z_BD.shape[1]), dtype=z_BD.dtype, device=z_BD.device)
    dz_BD = torch.zeros_like(z_BD)
    for start in range(0, len(drawn_S), ctx.chunk):
        local_C = drawn_S[start : start + ctx.chunk] - shard.start
        center_CD = normalize(centers_KD[local_C].to(z_BD.dtype), dim=1)
        cosine_BC, absent_BC = _negative_cosines(z_BD, center_CD, slots_BL - start, config)
        d_cosine_BC = cosine_BC.mul_(config.scale).sub_(shift_B1).exp_()
        d_cosine_BC = d_cosine_BC.masked_fill_(absent_BC, 0.0).mul_(factor_B1)
        add_product(dz_BD, d_cosine_BC, center_CD, config.products)
        slots = torch.searchsorted(active_A, local_C)
        d_center_AD[slots] += product(d_cosine_BC.T, z_BD, config.products)
    for column in range(labels_BL.shape[1] if len(active_A) else 0):
        local_B, owned_B = local_BL[:, column], owned_BL[:, column]
        d_cosine_B1 = d_cosine_BL[:, column, None]
        dz_BD += d_cosine_B1 * _positive_centers(centers_KD, local_B, owned_B, z_BD.dtype)
        slots = torch.searchsorted(active_A, torch.where(owned_B, local_B, active_A[0]))
        d_center_AD.index_add_(0, slots, (d_cosine_B1 * z_BD).masked_fill(~owned_B[:, None], 0.0))
    _differentiate_normalization(d_center_AD, centers_KD, active_A, ctx.chunk)
    d_center_AD = d_center_AD.to(centers_KD.dtype)
    if config.center_update == "sparse":
        d_centers = sparse_rows(active_A, d_center_AD, centers_KD.shape)
    else:
        d_centers = torch.zeros_like(centers_KD).index_add_(0, active_A, d_center_AD)
    # dz_BD is the part of dL/dz from this process's classes, for all samples. The backward pass of
    # the gather sums the parts; the factor undoes DDP's division by the number of processes.
    return dz_BD * ctx.shard_loss.world.size, d_centers


def _list_touched(drawn_S: Tensor, local_BL: Tensor, owned_BL: Tensor, num_owned: int) -> Tensor:
    """Returns the classes of this process that the step touches, drawn or positive, ascending.

    The last class is repeated to a size that the host knows. Only if this process owns none of the
    drawn classes does the host read the size from the device.
    """
    if len(drawn_S) == num_owned:
        return drawn_S
    if len(drawn_S) == 0:
        positives_only: Tensor = local_BL[owned_BL].unique()
        return positives_only
    positives = torch.where(owned_BL, local_BL, drawn_S[0])
    return distinct_rows(torch.cat([drawn_S, positives.flatten()]), num_owned)[0]


_log_sums: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = _LogSums.apply


def _choose_chunk(z_BD: Tensor) -> int:
    """Returns the number of drawn classes in a chunk."""
    num_rows, dimension = z_BD.shape
    if z_BD.is_cuda:  # limits the entries of both the logits and the centers of a chunk
        return max(1, CUDA_CHUNK_ENTRIES // max(1, num_rows, dimension))
    return max(1, CHUNK_ENTRIES // max(1, num_rows))


def _positive_cosines(
    z_BD: Tensor, centers_KD: Tensor, local_BL: Tensor, owned_BL: Tensor
) -> Tensor:
    # One column at a time takes [B, D] in memory instead of [B, L, D].
    columns = [
        (z_BD * _positive_centers(centers_KD, local_B, owned_B, z_BD.dtype)).sum(dim=1)
        for local_B, owned_B in zip(local_BL.unbind(1), owned_BL.unbind(1), strict=True)
    ]
    return torch.stack(columns, dim=1) if columns else z_BD.new_zeros(local_BL.shape)


def _positive_centers(
    centers_KD: Tensor, local_B: Tensor, owned_B: Tensor, dtype: torch.dtype
) -> Tensor:
    """Returns the unit center of each sample's label, [B, D]; 0 if another process owns it.

    All shapes are independent of the labels, so the host does not wait for the device.
    """
    if len(centers_KD) == 0:
        return centers_KD.new_zeros((len(local_B), centers_KD.shape[1]), dtype=dtype)
    centers_BD = normalize(centers_KD[torch.where(owned_B, local_B, 0)].to(dtype), dim=1)
    return centers_BD.masked_fill(~owned_B[:, None], 0.0)


def _apply_margin(cosine_BL: Tensor, config: HeadConfig) -> tuple[Tensor, Tensor]:
    """Returns the cosines with margin, and the derivatives of their logits by the cosines."""
    with torch.enable_grad():
        leaf = cosine_BL.detach().requires_grad_()
        with_margins = with_margin(
            leaf, kind=config.margin_kind, margin=config.margin, grad=config.margin_grad
        )
        (slope,) = torch.autograd.grad((config.scale * with_margins).sum(), leaf)
    return with_margins.detach(), slope


def _negative_cosines(
    z_BD: Tensor, center_CD: Tensor, slots_BL: Tensor, config: HeadConfig
) -> tuple[Tensor, Tensor]:
    """Returns the cosines of a chunk of drawn classes, and a mask of the absent entries.

    Absent are a sample's positives and the negatives that the filter leaves out. slots_BL: column
    of each label in the chunk; out of range for labels that are not in it.
    """
    cosine_BC = product(z_BD, center_CD.T, config.products)
    num = cosine_BC.shape[1]
    # Labels outside of the chunk go to an extra column, so that no shape depends on the labels.
    absent_BC = torch.zeros((len(z_BD), num + 1), dtype=torch.bool, device=z_BD.device)
    inside_BL = (slots_BL >= 0) & (slots_BL < num)
    absent_BC = absent_BC.scatter_(1, torch.where(inside_BL, slots_BL, num), True)[:, :num]
    if config.filter_threshold is not None:
        absent_BC = absent_BC | (cosine_BC > config.filter_threshold)
    return cosine_BC, absent_BC


def _differentiate_normalization(
    gradient_AD: Tensor, centers_KD: Tensor, rows_A: Tensor, chunk: int
) -> None:
    """Turns d/d(W/|W|) into d/dW in place: (g - u <u, g>) / |W|."""
    for start in range(0, len(rows_A), chunk):
        chunk_slice = slice(start, start + chunk)
        raw = centers_KD[rows_A[chunk_slice]].to(gradient_AD.dtype)
        # the epsilon of torch.nn.functional.normalize
        norm = raw.norm(dim=1, keepdim=True).clamp_min(1e-12)
        unit = raw / norm
        gradient = gradient_AD[chunk_slice]
        gradient_AD[chunk_slice] = (
            gradient - unit * (unit * gradient).sum(dim=1, keepdim=True)
        ) / norm


def _sum_exponentials(logits: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (max, sum exp(x - max), sum exp(x - max) slope) over dim 1.

    A row of -inf only gives (-inf, 0, 0).
    """
    largest = logits.amax(dim=1)
    exponentials = torch.exp(logits - _zero_if_empty(largest)[:, None])
    return largest, exponentials.sum(dim=1), (exponentials * slopes).sum(dim=1)


def _zero_if_empty(maxima: Tensor) -> Tensor:
    return torch.where(maxima == -torch.inf, torch.zeros_like(maxima), maxima)


def _subtract(old: Tensor, new: Tensor) -> Tensor:
    """Returns old - new, where old may be -inf."""
    return torch.where(old == -torch.inf, old, old - new)
