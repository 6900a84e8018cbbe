"""The classifier: one learnable center per class, of which a random part serves as negatives in each step."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from mlcd.errors import InvalidInput
from mlcd.losses.margins import MarginGrad, MarginKind, with_margin
from mlcd.losses.negatives import independent_negatives, mask_own_positives

_INIT_DEVIATION = 0.01  # insightface's and the authors' initialization


class PartialFC(nn.Module):
    """Class centers [K, D] on one process, and the logits of a batch against them."""

    def __init__(
        self,
        num_classes: int,
        dimension: int,
        *,
        scale: float,
        margin: float,
        margin_kind: MarginKind,
        margin_grad: MarginGrad,
        negative_ratio: float,
        seed: int,
    ) -> None:
        super().__init__()
        self.scale, self.margin, self.margin_kind, self.margin_grad = scale, margin, margin_kind, margin_grad
        self.negative_ratio, self.seed = negative_ratio, seed
        self.weight = nn.Parameter(torch.empty(num_classes, dimension))

    def initialize(self, generator: torch.Generator) -> None:
        with torch.no_grad():
            self.weight.normal_(0.0, _INIT_DEVIATION, generator=generator)

    def unit_centers(self) -> Tensor:
        return functional.normalize(self.weight.detach().float(), dim=1)

    def forward(self, embeddings_BD: Tensor, labels_BL: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(positive logits [B, L], negative logits [B, S], positive cosines [B, L], negative cosines [B, S]).

        Absent labels (-1) and a sample's own positives among the negatives are -inf in the logits and NaN in
        the cosines.
        """
        num_classes = self.weight.shape[0]
        if int(labels_BL.max()) >= num_classes:
            sample = int((labels_BL >= num_classes).any(dim=1).nonzero()[0])
            raise InvalidInput(f"sample {sample} has a label beyond the {num_classes} classes")
        drawn = independent_negatives(num_classes, self.negative_ratio, seed=self.seed, step=step)
        drawn_S = torch.from_numpy(drawn).to(embeddings_BD.device)
        z_BD = functional.normalize(embeddings_BD.float(), dim=1)
        present = labels_BL >= 0
        positives_BLD = functional.normalize(self.weight[labels_BL.clamp_min(0)].float(), dim=2)
        positive_cosines = torch.einsum("bd,bld->bl", z_BD, positives_BLD)
        negative_cosines = z_BD @ functional.normalize(self.weight[drawn_S].float(), dim=1).T
        lowered = with_margin(positive_cosines, kind=self.margin_kind, margin=self.margin, grad=self.margin_grad)
        positive_logits = (self.scale * lowered).masked_fill(~present, -torch.inf)
        negative_logits = mask_own_positives(self.scale * negative_cosines, drawn_S, labels_BL)
        return (
            positive_logits,
            negative_logits,
            positive_cosines.detach().masked_fill(~present, torch.nan),
            negative_cosines.detach().masked_fill(negative_logits == -torch.inf, torch.nan),
        )
