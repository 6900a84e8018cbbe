"""The weights that a run starts from: a run, a model artifact, or another project's weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from mlcd.artifacts.manifest import MANIFEST, Parent, open_artifact
from mlcd.errors import ConfigInvalid, MlcdError
from mlcd.models.runs import holds_checkpoints
from mlcd.models.servable import Servable
from mlcd.models.zoo import LoadOptions, at_resolution

# The field of a centers artifact's config with the digest of the classes of the head.
CLASSES: Final = "classes"
SIZES: Final = (
    "image_size", "patch_size", "width", "depth", "heads", "mlp_width", "embedding_dim",
    "activation", "positions", "norm_eps", "registers",
)  # fmt: skip
_REQUIRED_SIZES: Final = SIZES[:7]


@dataclass(frozen=True)
class Start:
    """A model to start from.

    parent: its identity. centers: path of the class centers that it was trained with, if mlcd
    trained it.
    """

    model: Servable
    parent: Parent
    centers: Path | None


def open_start(spec: str, like: str | None, out: Path) -> Start:
    """Loads the model at `spec`; its parent's path is relative to `out`.

    Raises ConfigInvalid for a model that cannot be trained, and the errors of
    `mlcd.models.zoo.load`.
    """
    _refuse_untrainable(spec)
    if like is not None and _is_ours(spec):
        raise ConfigInvalid(
            f"model.like requires a bare file of weights, but {spec} contains its own sizes",
            remedy="leave out model.like",
        )
    # Imported here, because it imports onnx and an inference engine, which other runs do not need.
    from mlcd.export.model_artifact import find_weights, load_weights

    weights = find_weights(spec, out, LoadOptions(like=like))
    model = load_weights(weights, spec)
    role = weights.parent.role if weights.parent.role == "weights" else "start"
    return Start(model, replace(weights.parent, role=role), weights.centers)


def tower_fields(spec: str, like: str | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes of the tower at `spec`, at the resolution of `fields`.

    fields: the recipe's model section. If it sets every size, the weights are not opened yet.
    Raises ConfigInvalid if a size contradicts the weights.
    """
    if fields.keys() >= set(_REQUIRED_SIZES):
        return {name: fields[name] for name in SIZES if name in fields}
    return read_sizes(open_start(spec, like, Path()).model, spec, fields)


def read_sizes(model: Servable, spec: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes of a model, at the resolution of `fields`.

    Raises ConfigInvalid if another size in `fields` contradicts the model.
    """
    config = model.trunk.config
    sizes = config.to_dict()
    for name in SIZES:
        if name != "image_size" and name in fields and fields[name] != sizes[name]:
            raise ConfigInvalid(
                f"model.{name}={fields[name]}, but the weights at {spec} have {sizes[name]}",
                remedy=f"leave out model.{name}, or start from other weights",
            )
    size = fields.get("image_size", model.preprocess.crop)
    if not isinstance(size, int) or size < 1 or size % config.patch_size:
        raise ConfigInvalid(
            f"model.image_size must be a multiple of the patch size {config.patch_size} of {spec},"
            f" got {size}"
        )
    return {**{name: sizes[name] for name in SIZES}, "image_size": size}


def at_image_size(model: Servable, image_size: int) -> Servable:
    """Returns the model for images of this size; resamples its positions if the size differs."""
    sizes = (model.preprocess.crop, model.trunk.config.image_size)
    return model if sizes == (image_size, image_size) else at_resolution(model, image_size)


def find_matching_centers(start: Start, classes: str | None) -> Path | None:
    """Returns the path of the start's centers if they belong to these classes, else None.

    classes: digest of the labels' classes; None if the labels do not record it.
    """
    if start.centers is None or classes is None:
        return None
    trained_on = open_artifact(start.centers, "centers", verify_files=False).config.get(CLASSES)
    return start.centers if trained_on == classes else None


def _refuse_untrainable(spec: str) -> None:
    if Path(spec).suffix == ".onnx":
        raise ConfigInvalid(
            f"{spec} is an ONNX graph, which cannot be trained",
            remedy="give the weights that it was exported from",
        )


def _is_ours(spec: str) -> bool:
    path = Path(spec)
    if holds_checkpoints(path):
        return True
    try:
        return (path / MANIFEST).is_file() and open_artifact(path, verify_files=False).kind == (
            "model"
        )
    except MlcdError:
        return False
