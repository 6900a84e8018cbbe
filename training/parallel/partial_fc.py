"""The classifier: a million class centers sharded over processes, a random part of which is used in each step.

The loss needs of each process only two log-sums per sample, over the negatives and over the positives that it
owns. They are reduced with two all-reduces, and softplus is taken once, afterwards. Negatives are computed in
chunks and again in the backward pass, so no [B, |S|] tensor is ever kept.

Shapes: B global batch, D dimension, K classes of this process, L labels per sample, S drawn classes of this process.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from mlcd.artifacts.centers import Centers
from mlcd.errors import ConfigInvalid
from mlcd.losses.discrimination import mlc_from_log_sums, mlcd_from_log_sums
from mlcd.losses.margins import MarginGrad, MarginKind, with_margin
from mlcd.losses.negatives import NegativePolicy, draw_negatives, own_positions
from mlcd.losses.positives import distinct_labels
from mlcd.randomness import Stream, hash_counters
from mlcd.world import World
from training.parallel.shards import Shard

LossKind = Literal["mlcd", "mlc", "cd", "per_column"]
CenterUpdate = Literal["sparse", "dense"]

_INIT_DEVIATION: Final = 0.01  # insightface's and the authors' initialization
_INIT_BLOCK: Final = 4096
CHUNK_ENTRIES: Final = 1 << 21  # logits held at once: 8 MiB in float32


@dataclass(frozen=True)
class HeadConfig:
    """What the loss is; see `training.config.LossConfig` for the meaning of each."""

    kind: LossKind = "mlcd"
    scale: float = 64.0
    margin_kind: MarginKind = "arcface"
    margin: float = 0.3
    margin_grad: MarginGrad = "straight_through"
    bias: float = 0.0
    negative_ratio: float = 0.1
    policy: NegativePolicy = "independent"
    correct_ratio: bool = False
    filter_threshold: float | None = None
    center_update: CenterUpdate = "sparse"
    seed: int = 0


@dataclass(frozen=True)
class HeadOutput:
    """loss: the mean over the global batch, the same on every process. meters: scalars without gradient."""

    loss: Tensor
    meters: dict[str, Tensor]


class PartialFC(nn.Module):
    """The centers of this process's shard, [K, D], and the loss of the global batch against all of them.

    The gradient of `weight` is complete on its owner (keep it out of DDP); that of the embeddings is such that
    the average over processes, which DDP takes, is the gradient of the global mean loss.
    """

    def __init__(
        self, num_classes: int, dimension: int, config: HeadConfig, *, world: World | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.world = world or World()
        self.shard = Shard.of(self.world.rank, self.world.size, num_classes)
        self.weight = nn.Parameter(torch.empty(len(self.shard), dimension))

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """N(0, 0.01), a function of (seed, class id): the same centers for any number of processes."""
        first_seed = int(hash_counters(seed, Stream.CENTERS)[0])
        for block in range(self.shard.start // _INIT_BLOCK, -(-self.shard.stop // _INIT_BLOCK)):
            first = block * _INIT_BLOCK
            # torch takes the low 32 bits of a seed; counted on from the first, no two blocks have the same.
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
    def initialize_from(self, centers: Centers) -> None:
        """Start from a Centers artifact of the same dimension and number of classes.

        Rows get the norm that random ones have on average: only directions matter, and how far one update turns a row
        is the learning rate over its norm.
        """
        num, dimension = centers.vectors.shape
        if (num, dimension) != (self.shard.num_classes, self.weight.shape[1]):
            raise ConfigInvalid(
                f"{num} centers of dimension {dimension} cannot start a head of {self.shard.num_classes} classes and"
                f" dimension {self.weight.shape[1]}",
                remedy="start from random centers, or set model.embedding_dim to theirs",
            )
        unit = torch.from_numpy(centers.vectors[self.shard.start : self.shard.stop])
        self.weight.copy_(unit * (_INIT_DEVIATION * math.sqrt(dimension)))

    def unit_centers(self) -> Tensor:
        """This process's unit centers, float32 [K, D]."""
        return normalize(self.weight.detach().float(), dim=1)

    def forward(
        self, embeddings: Tensor, labels: Tensor, step: int, *, step_labels: Tensor | None = None
    ) -> HeadOutput:
        """Embeddings [B_local, D] of any length, labels int64 [B_local, L] (-1 for none) of this process's samples.

        step_labels: int64 [n, L], of all samples of the step where these are a part of it: negatives that depend on
        labels are drawn for the whole step. Raises InvalidInput naming a sample whose label is no class.
        """
        with torch.autocast(embeddings.device.type, enabled=False):
            wide = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
            z_BD = self.world.gather_rows(normalize(wide, dim=1))
            columns = 1 if self.config.kind == "cd" else labels.shape[1]
            labels_BL = self.world.gather_rows(
                distinct_labels(labels[:, :columns], self.shard.num_classes)
            )
            whole = (
                labels_BL
                if step_labels is None
                else distinct_labels(step_labels[:, :columns], self.shard.num_classes)
            )
            if self.config.kind == "per_column":
                return self._per_column(z_BD, labels_BL, whole, step)
            drawn = self._draw(whole, step, self.config.policy)
            sums = self._log_sums(z_BD, labels_BL, drawn)
            return self._finish(sums, labels_BL, whole)

    def _draw(
        self, labels_BL: Tensor, step: int, policy: NegativePolicy, column: int | None = None
    ) -> Tensor:
        return draw_negatives(
            self.shard.num_classes,
            self.config.negative_ratio,
            seed=self.config.seed,
            step=step,
            policy=policy,
            labels=labels_BL,
            column=column,
            device=labels_BL.device,
        )

    def _log_sums(self, z_BD: Tensor, labels_BL: Tensor, drawn: Tensor) -> "_Sums":
        owned = drawn[(drawn >= self.shard.start) & (drawn < self.shard.stop)]
        lse_positive, lse_negative, facts = _log_sums(
            z_BD, self.weight, labels_BL, owned, self.shard, self.config, self.world
        )
        return _Sums(lse_positive, lse_negative, facts, self.shard.num_classes)

    def _finish(self, sums: "_Sums", labels_BL: Tensor, step_labels: Tensor) -> HeadOutput:
        config = self.config
        lse_negative = (
            sums.corrected_negative(labels_BL) if config.correct_ratio else sums.lse_negative
        )
        if config.kind == "mlcd":
            losses = mlcd_from_log_sums(sums.lse_positive, lse_negative, bias=config.bias)
        else:
            losses = mlc_from_log_sums(sums.lse_positive, lse_negative)
        return HeadOutput(losses.mean(), sums.meters(labels_BL, step_labels))

    def _per_column(
        self, z_BD: Tensor, labels_BL: Tensor, step_labels: Tensor, step: int
    ) -> HeadOutput:
        """The authors' later form: one softmax per label column; a sample's other labels are negatives."""
        present = labels_BL >= 0
        total = z_BD.new_zeros(z_BD.shape[0])
        meters: list[dict[str, Tensor]] = []
        for column in range(labels_BL.shape[1]):
            labels = labels_BL[:, column : column + 1]
            of_step = step_labels[:, column : column + 1]
            sums = self._log_sums(z_BD, labels, self._draw(of_step, step, "partialfc", column))
            total = (
                total + mlc_from_log_sums(sums.lse_positive, sums.lse_negative) * present[:, column]
            )
            meters.append(sums.meters(labels, of_step))
        losses = total / present.sum(dim=1).clamp_min(
            1
        )  # a sample without labels has no softmax, and adds nothing
        mean = {name: torch.stack([each[name] for each in meters]).nanmean() for name in meters[0]}
        return HeadOutput(losses.mean(), mean)


@dataclass(frozen=True)
class _Sums:
    """Reduced over processes. facts [B, 4]: of each sample, positives: count, cosine sum; negatives: the same."""

    lse_positive: Tensor
    lse_negative: Tensor
    facts: Tensor
    num_classes: int

    def corrected_negative(self, labels_BL: Tensor) -> Tensor:
        """LSEn + log(|all negatives| / |drawn negatives|): what all negatives would sum to, in expectation."""
        all_negatives = self.num_classes - (labels_BL >= 0).sum(dim=1)
        return self.lse_negative + torch.log(all_negatives / self.facts[:, 2].clamp_min(1))

    def meters(self, labels_BL: Tensor, step_labels: Tensor) -> dict[str, Tensor]:
        positives, positive_cosines, negatives, negative_cosines = self.facts.sum(dim=0)
        lse_positive, lse_negative = self.lse_positive.detach(), self.lse_negative.detach()
        return {
            "positive_cosine": positive_cosines / positives,
            "negative_cosine": negative_cosines / negatives,
            "lse_positive": lse_positive[lse_positive > -torch.inf].mean(),
            "lse_negative": lse_negative[lse_negative > -torch.inf].mean(),
            "sigma_positive": torch.sigmoid(lse_positive).mean(),
            "sigma_negative": torch.sigmoid(lse_negative).mean(),
            "unique_positives": torch.tensor(float(len(step_labels[step_labels >= 0].unique()))),
            "effective_negatives": negatives / len(labels_BL),
        }


class _LogSums(torch.autograd.Function):
    """(LSEp [B], LSEn [B], facts [B, 4]) over the classes of all processes, differentiable in z and weight."""

    @staticmethod
    def forward(
        ctx: Any,
        z_BD: Tensor,
        weight_KD: Tensor,
        labels_BL: Tensor,
        drawn_S: Tensor,
        shard: Shard,
        config: HeadConfig,
        world: World,
    ) -> tuple[Tensor, Tensor, Tensor]:
        local_BL = labels_BL - shard.start
        owned_BL = (labels_BL >= shard.start) & (labels_BL < shard.stop)
        cosine_BL = _positive_cosines(z_BD, weight_KD, local_BL, owned_BL)
        logit_BL, slope_BL = _positive_logits(cosine_BL, config)
        positive_max, positive_sum = _max_and_sum((-logit_BL).masked_fill(~owned_BL, -torch.inf))
        own_rows, own_slots = own_positions(drawn_S, labels_BL)
        negative_max = z_BD.new_full((z_BD.shape[0],), -torch.inf)
        negative_sum, count_B, total_B = (torch.zeros_like(negative_max) for _ in range(3))
        chunk = max(1, CHUNK_ENTRIES // max(1, z_BD.shape[0]))
        bounds = _hit_bounds(own_slots, len(drawn_S), chunk)
        for start in range(0, len(drawn_S), chunk):
            piece = slice(start, start + chunk)
            center_CD = normalize(weight_KD[drawn_S[piece] - shard.start].to(z_BD.dtype), dim=1)
            hits = slice(*bounds[start // chunk : start // chunk + 2])
            cosine_BC, absent_BC = _negative_cosines(
                z_BD, center_CD, own_rows[hits], own_slots[hits] - start, config
            )
            total_B += cosine_BC.masked_fill(absent_BC, 0.0).sum(dim=1)
            count_B += cosine_BC.shape[1] - absent_BC.sum(dim=1)
            logit_BC = cosine_BC.mul_(config.scale).masked_fill_(absent_BC, -torch.inf)
            new_max = torch.maximum(negative_max, logit_BC.amax(dim=1))
            safe_max = _zero_if_empty(new_max)
            negative_sum = negative_sum * torch.exp(_minus(negative_max, safe_max))
            negative_sum += logit_BC.sub_(safe_max[:, None]).exp_().sum(dim=1)
            negative_max = new_max
        # Two all-reduces: the maxima, then the sums rescaled to them together with the facts for the meters.
        maxima = torch.stack([positive_max, negative_max])
        reduced_max = world.max(maxima)
        rescale = torch.exp(_minus(maxima, _zero_if_empty(reduced_max)))
        facts = torch.stack(
            [
                owned_BL.sum(dim=1).to(z_BD.dtype),
                (cosine_BL * owned_BL).sum(dim=1),
                count_B,
                total_B,
            ]
        )
        sums = world.sum(torch.cat([torch.stack([positive_sum, negative_sum]) * rescale, facts]))
        lse_positive, lse_negative = (_zero_if_empty(reduced_max) + sums[:2].log()).unbind(0)
        facts_B4 = sums[2:].T.contiguous()
        ctx.save_for_backward(
            z_BD,
            weight_KD,
            labels_BL,
            drawn_S,
            logit_BL,
            slope_BL,
            lse_positive,
            lse_negative,
            own_rows,
            own_slots,
        )
        ctx.shard, ctx.config, ctx.world, ctx.chunk, ctx.bounds = (
            shard,
            config,
            world,
            chunk,
            bounds,
        )
        ctx.mark_non_differentiable(facts_B4)
        return lse_positive, lse_negative, facts_B4

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        # Backward may be called under an autocast of the caller's.
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
            d_embeddings, d_weight = _gradients(ctx, gradients[0], gradients[1])
        return d_embeddings, d_weight, None, None, None, None, None


def _gradients(ctx: Any, d_positive: Tensor, d_negative: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of z and weight, from those of the two log-sums."""
    (
        z_BD,
        weight_KD,
        labels_BL,
        drawn_S,
        logit_BL,
        slope_BL,
        lse_positive,
        lse_negative,
        own_rows,
        own_slots,
    ) = ctx.saved_tensors
    shard, config = ctx.shard, ctx.config
    local_BL = labels_BL - shard.start
    owned_BL = (labels_BL >= shard.start) & (labels_BL < shard.stop)
    # One row of `center_AD` for each class that this step touches here, drawn or positive.
    active_A = torch.cat([drawn_S - shard.start, local_BL[owned_BL]]).unique()
    center_AD = torch.zeros((len(active_A), z_BD.shape[1]), dtype=z_BD.dtype, device=z_BD.device)
    dz_BD = torch.zeros_like(z_BD)
    # dLSEn/ds_j = softmax(s)_j and ds_j/dcos = scale (method.md 2.8).
    factor_B1 = (d_negative * config.scale)[:, None]
    shift_B1 = _zero_if_empty(lse_negative)[:, None]
    for start in range(0, len(drawn_S), ctx.chunk):
        local_C = drawn_S[start : start + ctx.chunk] - shard.start
        center_CD = normalize(weight_KD[local_C].to(z_BD.dtype), dim=1)
        hits = slice(*ctx.bounds[start // ctx.chunk : start // ctx.chunk + 2])
        cosine_BC, absent_BC = _negative_cosines(
            z_BD, center_CD, own_rows[hits], own_slots[hits] - start, config
        )
        share_BC = (
            cosine_BC.mul_(config.scale)
            .sub_(shift_B1)
            .exp_()
            .masked_fill_(absent_BC, 0.0)
            .mul_(factor_B1)
        )
        dz_BD.addmm_(share_BC, center_CD)
        slots = torch.searchsorted(active_A, local_C)
        center_AD[slots] += share_BC.T @ z_BD
    # dLSEp/ds_i = -softmax(-s)_i, and the slope of the margin.
    weight_BL = torch.exp(-logit_BL - _zero_if_empty(lse_positive)[:, None]) * slope_BL
    share_BL = torch.where(owned_BL, -d_positive[:, None] * weight_BL, torch.zeros_like(weight_BL))
    for column in range(labels_BL.shape[1]):
        rows = owned_BL[:, column].nonzero()[:, 0]
        if len(rows) == 0:
            continue
        local, share = local_BL[rows, column], share_BL[rows, column, None]
        dz_BD.index_add_(0, rows, share * normalize(weight_KD[local].to(z_BD.dtype), dim=1))
        center_AD.index_add_(0, torch.searchsorted(active_A, local), share * z_BD[rows])
    _through_normalization(center_AD, weight_KD, active_A, ctx.chunk)
    center_AD = center_AD.to(weight_KD.dtype)
    if config.center_update == "sparse":
        # `unique` gives sorted, distinct indices in range: nothing is left to check.
        d_weight = torch.sparse_coo_tensor(
            active_A[None], center_AD, weight_KD.shape, is_coalesced=True, check_invariants=False
        )
    else:
        d_weight = torch.zeros_like(weight_KD).index_copy_(0, active_A, center_AD)
    # This process computed the part of dL/dz that its classes give, for all samples. The gather's backward adds
    # the parts up; DDP then divides by the number of processes, which is undone here.
    return dz_BD * ctx.world.size, d_weight


_log_sums: Callable[..., tuple[Tensor, Tensor, Tensor]] = _LogSums.apply


def _positive_cosines(
    z_BD: Tensor, weight_KD: Tensor, local_BL: Tensor, owned_BL: Tensor
) -> Tensor:
    cosine_BL = z_BD.new_zeros(local_BL.shape)
    for column in range(local_BL.shape[1]):  # one column at a time: [B, D] in memory, not [B, L, D]
        rows = owned_BL[:, column].nonzero()[:, 0]
        centers = normalize(weight_KD[local_BL[rows, column]].to(z_BD.dtype), dim=1)
        cosine_BL[rows, column] = (z_BD[rows] * centers).sum(dim=1)
    return cosine_BL


def _positive_logits(cosine_BL: Tensor, config: HeadConfig) -> tuple[Tensor, Tensor]:
    """Logits with margin, and their derivative by the cosine."""
    with torch.enable_grad():
        leaf = cosine_BL.detach().requires_grad_()
        logits = config.scale * with_margin(
            leaf, kind=config.margin_kind, margin=config.margin, grad=config.margin_grad
        )
        (slope,) = torch.autograd.grad(logits.sum(), leaf)
    return logits.detach(), slope


def _negative_cosines(
    z_BD: Tensor, center_CD: Tensor, own_rows: Tensor, own_slots: Tensor, config: HeadConfig
) -> tuple[Tensor, Tensor]:
    """Cosines of a chunk of drawn classes, and which entries are absent: own positives, and what the filter takes."""
    cosine_BC = z_BD @ center_CD.T
    absent_BC = torch.zeros_like(cosine_BC, dtype=torch.bool)
    absent_BC[own_rows, own_slots] = True
    if config.filter_threshold is not None:
        absent_BC |= cosine_BC > config.filter_threshold
    return cosine_BC, absent_BC


def _hit_bounds(own_slots: Tensor, num_drawn: int, chunk: int) -> list[int]:
    """Where in `own_slots` (ascending) the hits of each chunk begin, and the end: one read by the host for all."""
    starts = torch.arange(0, num_drawn + chunk, chunk, device=own_slots.device)
    bounds: list[int] = torch.searchsorted(own_slots, starts).tolist()
    return bounds


def _through_normalization(
    gradient_AD: Tensor, weight_KD: Tensor, rows_A: Tensor, chunk: int
) -> None:
    """In place, from d/d(W/|W|) to d/dW: (g - u <u, g>) / |W|."""
    for start in range(0, len(rows_A), chunk):
        piece = slice(start, start + chunk)
        raw = weight_KD[rows_A[piece]].to(gradient_AD.dtype)
        norm = raw.norm(dim=1, keepdim=True).clamp_min(1e-12)  # as torch.nn.functional.normalize
        unit = raw / norm
        gradient = gradient_AD[piece]
        gradient_AD[piece] = (gradient - unit * (unit * gradient).sum(dim=1, keepdim=True)) / norm


def _max_and_sum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(max, sum exp(x - max)) over dim 1; (-inf, 0) where every entry is -inf."""
    largest = logits.amax(dim=1)
    return largest, torch.exp(logits - _zero_if_empty(largest)[:, None]).sum(dim=1)


def _zero_if_empty(maxima: Tensor) -> Tensor:
    return torch.where(maxima == -torch.inf, torch.zeros_like(maxima), maxima)


def _minus(old: Tensor, new: Tensor) -> Tensor:
    """Old - new where old may be -inf."""
    return torch.where(old == -torch.inf, old, old - new)
