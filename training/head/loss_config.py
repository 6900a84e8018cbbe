"""The settings of the loss and its class centers."""

import math
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from mlcd.losses.margins import MarginGrad, MarginKind
from mlcd.losses.negatives import NegativePolicy
from mlcd.training.section import Section

_SOME_CLASSES = 500

_MANY_CLASSES = 10_000  # up to this number, all classes are drawn as negatives

_PUBLISHED_CLASSES = 1_000_000

_PUBLISHED_SCALE = 64.0

_PUBLISHED_RATIO = 0.1

_MARGIN: Final = 0.3

LossKind = Literal["mlcd", "mlc", "cd"]

CenterUpdate = Literal["sparse", "dense"]


class LossConfig(Section):
    """The loss and its class centers."""

    kind: LossKind = "mlcd"
    """mlcd: Eq. 5. mlc: Eq. 4. cd: Eq. 3, one label."""
    labels_per_image: Annotated[int, Field(ge=1)] = 8
    """l, the number of nearest centers taken as positives. CD takes one."""
    drawn_from: Annotated[int, Field(ge=2)] | None = None
    """The number of nearest centers from which l positives are drawn each time an image is seen;
    centers that are not drawn count as negatives. The authors' OneVision-Encoder draws 8 of 10.
    None: always the nearest l.
    """
    scale: Annotated[float, Field(gt=0)] | None = None
    """s, the scale of the logits. None: 16 below 500 centers; up to 10,000 centers 8 for mlcd and
    mlc, 16 for cd; above, interpolated log-log to the authors' 64 at a million centers.
    """
    learn_scale: bool = False
    """Learns the scale, starting from loss.scale."""
    negative_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """r, the share of classes drawn as negatives. None: 1 for up to 10,000 centers; for k > 10,000
    centers 10,000 / k, but at least the published 0.1.
    """
    margin_kind: MarginKind = "arcface"
    """arcface: added to the angle. cosface: subtracted from the cosine. Applies to positives only.
    """
    margin: Annotated[float, Field(ge=0, lt=1.5)] = _MARGIN
    """The margin in radians (arcface), or in units of the cosine (cosface)."""
    margin_grad: MarginGrad = "straight_through"
    """straight_through: gradients ignore the margin's slope, as in the authors' code. exact: they
    include it.
    """
    bias: float | None = None
    """b, added to every logit; mlcd is then ZLPR with threshold -b. Only for mlcd. None: 0, or if
    learned -log(r k / l), which balances negatives and positives.
    """
    learn_bias: bool = False
    """Learns the bias, starting from loss.bias."""
    label_weights: Literal["scores"] | None = None
    """scores: labels are weighted by their stored similarity, divided by the mean over the image's
    labels. None: equal weights.
    """
    policy: NegativePolicy = "independent"
    """How negatives are drawn."""
    correct_ratio: bool = False
    """Adds log(1/r) to the negatives' log-sum, to estimate the log-sum over all negatives."""
    filter_threshold: Annotated[float, Field(gt=-1, le=1)] | None = None
    """Leaves out negatives with a larger cosine. The authors' OneVision-Encoder uses 0.75."""
    center_update: CenterUpdate = "sparse"
    """sparse: a step updates only its positives and drawn negatives. dense: AdamW updates all
    centers in each step, by momentum.
    """

    @model_validator(mode="after")
    def _no_dead_options(self) -> Self:
        if self.kind != "mlcd":
            if self.bias:
                raise ValueError(f"loss.bias requires loss.kind=mlcd, got {self.kind}")
            if self.learn_bias:
                raise ValueError(f"loss.learn_bias requires loss.kind=mlcd, got {self.kind}")
        if self.label_weights is not None and self.num_labels == 1:
            raise ValueError("loss.label_weights requires at least 2 labels per image, got 1")
        if self.correct_ratio and self.filter_threshold is not None:
            raise ValueError(
                "loss.correct_ratio would compensate for the negatives that loss.filter_threshold "
                "leaves out: set only one of them"
            )
        # Compares values, not which fields are set: a saved configuration sets all fields.
        if self.margin_kind == "none" and self.margin != _MARGIN:
            raise ValueError("loss.margin requires loss.margin_kind=arcface or cosface, got none")
        if self.drawn_from is not None and self.drawn_from <= self.num_labels:
            raise ValueError(
                f"loss.drawn_from must be more than the {self.num_labels} labels per image, got "
                f"{self.drawn_from}"
            )
        return self

    @property
    def num_labels(self) -> int:
        """Returns the largest number of labels that an image is trained with."""
        return 1 if self.kind == "cd" else self.labels_per_image

    @property
    def num_stored(self) -> int:
        """Returns the number of labels that must be stored for each image."""
        return self.drawn_from or self.num_labels

    def resolve_scale(self, num_classes: int) -> float:
        """Returns the scale: the best measured for few classes, the authors' for a million, and
        interpolated between them. For the evidence see docs/explanation/validation.md.
        """
        if self.scale is not None:
            return self.scale
        few_scale = 8.0 if num_classes >= _SOME_CLASSES and self.kind in ("mlcd", "mlc") else 16.0
        progress = math.log(num_classes / _MANY_CLASSES) / math.log(
            _PUBLISHED_CLASSES / _MANY_CLASSES
        )
        return float(few_scale * (_PUBLISHED_SCALE / few_scale) ** min(1.0, max(0.0, progress)))

    def resolve_bias(self, num_classes: int) -> float:
        if self.bias is not None:
            return self.bias
        if not self.learn_bias:
            return 0.0
        return -math.log(self.resolve_ratio(num_classes) * num_classes / self.num_labels)

    def resolve_ratio(self, num_classes: int) -> float:
        return self.negative_ratio or max(_PUBLISHED_RATIO, min(1.0, _MANY_CLASSES / num_classes))
