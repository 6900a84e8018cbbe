"""The settings of crops, flips and changes of color."""

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from mlcd.training.section import Section

_Share = Annotated[float, Field(ge=0, le=1)]

# One share for all views, or a list: one share per global view, then one for all local views if
# there are any.
_Shares = _Share | tuple[_Share, ...]

_DEFAULT_JITTER: Final = 0.8


class AugmentConfig(Section):
    """Random resized crop, flip and changes of color, distributed like torchvision's.

    The defaults follow the authors' OneVision-Encoder: no changes of color, and one view.
    """

    views: Annotated[int, Field(ge=1)] = 1
    """The number of views (crops) of each image, of side model.image_size. Each has the image's
    labels, and the loss is the mean over views.
    """
    min_area: Annotated[float, Field(gt=0, le=1)] = 0.7
    """The smallest area of a crop, as a share of the image's area; smaller if a crop of the sampled
    aspect ratio does not fit."""
    max_aspect: Annotated[float, Field(ge=1)] = 1.25
    """The largest ratio of a crop's sides, measured on the original image."""
    flip: _Share = 0.5
    """The share of the crops that are mirrored."""
    local_views: Annotated[int, Field(ge=0)] = 0
    """The number of further views of each image, of side augment.local_size (multi-crop)."""
    local_size: Annotated[int, Field(ge=1)] | None = None
    """The side of a local view in pixels, a multiple of model.patch_size."""
    local_area: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = (
        0.05,
        0.32,
    )
    """The smallest and the largest share of the image's area in a local view."""
    brightness: Annotated[float, Field(ge=0)] = 0.0
    """Pixels are multiplied by a factor within 1 ± this."""
    contrast: Annotated[float, Field(ge=0)] = 0.0
    """Differences from the mean gray are multiplied by a factor within 1 ± this."""
    saturation: Annotated[float, Field(ge=0)] = 0.0
    """Differences from a pixel's own gray are multiplied by a factor within 1 ± this."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """The hue turns by at most this share of the circle."""
    jitter: _Share = _DEFAULT_JITTER
    """The share of the views that brightness, contrast, saturation and hue apply to."""
    grayscale: _Share = 0.0
    """The share of the views that lose their colors."""
    blur: _Shares = 0.0
    """The share of the views that are blurred: a number, or a list with one number per global view
    and then one for all local views.
    """
    blur_sigma: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (0.1, 2.0)
    """The smallest and the largest standard deviation of the blur, in pixels of the view."""
    solarize: _Shares = 0.0
    """The share of the views whose values >= 128 are inverted; a number or a list, like blur."""

    @model_validator(mode="after")
    def _no_dead_options(self) -> Self:
        if (self.local_size is None) != (self.local_views == 0):
            raise ValueError(
                "augment.local_views and augment.local_size require each other: set both"
            )
        if self.jitter != _DEFAULT_JITTER and not any(self.jitters.values()):
            raise ValueError(
                "augment.jitter requires augment.brightness, contrast, saturation or hue"
            )
        for name in ("local_area", "blur_sigma"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(
                    f"augment.{name} must be (smallest, largest), got ({low:g}, {high:g})"
                )
        for name in ("blur", "solarize"):
            shares, num_kinds = getattr(self, name), self.views + bool(self.local_views)
            if isinstance(shares, tuple) and len(shares) != num_kinds:
                raise ValueError(
                    f"augment.{name} must be 1 number, or 1 for each of {num_kinds} kinds of views,"
                    f" got {len(shares)}"
                )
        return self

    @property
    def num_views(self) -> int:
        """Returns the number of views of an image, global and local."""
        return self.views + self.local_views

    @property
    def jitters(self) -> dict[str, float]:
        """Returns the strength of each change of color that `jitter` applies to."""
        names = ("brightness", "contrast", "saturation", "hue")
        return {name: getattr(self, name) for name in names}

    def share_of(self, name: Literal["blur", "solarize"], view: int) -> float:
        """Returns the share of images for which this view is blurred or solarized.

        view: index from 0; local views come last.
        """
        shares: float | tuple[float, ...] = getattr(self, name)
        return shares[min(view, self.views)] if isinstance(shares, tuple) else shares

    def size_of(self, view: int, image_size: int) -> int:
        """Returns the side of a view in pixels: `image_size`, or local_size of a local view."""
        if view < self.views:
            return image_size
        assert self.local_size is not None
        return self.local_size

    def area_of(self, view: int) -> tuple[float, float]:
        """Returns the smallest and the largest share of the image's area that a view has."""
        return (self.min_area, 1.0) if view < self.views else self.local_area
