"""The settings of the loss and its class centers."""

import math
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from mlcd.losses.margins import MarginGrad, MarginKind
from mlcd.losses.negatives import NegativePolicy
from mlcd.training.section import Section

_SOME_CLASSES = 500

_MANY_CLASSES = 10_000  # the most classes that are all drawn as negatives

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
    """The number of nearest centers that the l positives are drawn from each time an image is seen;
    the others count as negatives. The authors' later code draws 8 of 10. None: always the nearest
    l.
    """
    scale: Annotated[float, Field(gt=0)] | None = None
    """s, the scale of the logits. None: 16 below 500 centers; up to 10,000 centers 8 for mlcd and
    mlc, 16 for cd; from there linear in the logarithms to the authors' 64 at a million.
    """
    learn_scale: bool = False
    """The scale is learned, and loss.scale is where it starts."""
    negative_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """r, the share of classes drawn as negatives. None: 1 up to 10,000 centers k, then 10,000 / k,
    at least the published 0.1.
    """
    margin_kind: MarginKind = "arcface"
    """arcface: added to the angle. cosface: subtracted from the cosine. Applies to positives only.
    """
    margin: Annotated[float, Field(ge=0, lt=1.5)] = _MARGIN
    """The margin in radians (arcface), or in units of the cosine (cosface)."""
    margin_grad: MarginGrad = "straight_through"
    """straight_through: without the margin's own slope, as in the authors' code. exact: with it."""
    bias: float | None = None
    """b, added to every logit; mlcd is then ZLPR with threshold -b. Only for mlcd. None: 0, and
    -log(r k / l) where it is learned, which weighs negatives and positives alike.
    """
    learn_bias: bool = False
    """The bias is learned, and loss.bias is where it starts."""
    label_weights: Literal["scores"] | None = None
    """scores: labels count by their stored similarity, relative to the mean of the image's. None:
    alike.
    """
    policy: NegativePolicy = "independent"
    """How negatives are drawn."""
    correct_ratio: bool = False
    """Adds log(1/r) to the negatives' log-sum, as if all negatives had been used."""
    filter_threshold: Annotated[float, Field(gt=-1, le=1)] | None = None
    """Negatives more similar than this are left out. The authors' later code uses 0.75."""
    center_update: CenterUpdate = "sparse"
    """sparse: only centers that a step touched move. dense: AdamW moves all centers, by momentum.
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
                "loss.correct_ratio would add back what loss.filter_threshold leaves out: take one "
                "of them"
            )
        # Not what is set: a saved configuration sets everything.
        if self.margin_kind == "none" and self.margin != _MARGIN:
            raise ValueError("loss.margin requires loss.margin_kind=arcface or cosface, got none")
        if self.drawn_from is not None and self.drawn_from <= self.num_labels:
            raise ValueError(
                f"loss.drawn_from must be more than the {self.num_labels} labels per image"
            )
        return self

    @property
    def num_labels(self) -> int:
        """Returns the most labels that an image is trained with."""
        return 1 if self.kind == "cd" else self.labels_per_image

    @property
    def num_stored(self) -> int:
        """Returns the number of labels that each image must come with."""
        return self.drawn_from or self.num_labels

    def resolve_scale(self, num_classes: int) -> float:
        """Returns the scale measured for few classes, the authors' for a million, without a jump.

        For the evidence see docs/explanation/validation.md.
        """
        if self.scale is not None:
            return self.scale
        few = 8.0 if num_classes >= _SOME_CLASSES and self.kind in ("mlcd", "mlc") else 16.0
        way = math.log(num_classes / _MANY_CLASSES) / math.log(_PUBLISHED_CLASSES / _MANY_CLASSES)
        return float(few * (_PUBLISHED_SCALE / few) ** min(1.0, max(0.0, way)))

    def resolve_bias(self, num_classes: int) -> float:
        if self.bias is not None:
            return self.bias
        if not self.learn_bias:
            return 0.0
        return -math.log(self.resolve_ratio(num_classes) * num_classes / self.num_labels)

    def resolve_ratio(self, num_classes: int) -> float:
        return self.negative_ratio or max(_PUBLISHED_RATIO, min(1.0, _MANY_CLASSES / num_classes))
