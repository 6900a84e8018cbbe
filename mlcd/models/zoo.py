"""Loads models by name or path: published towers, directories of Hugging Face and open_clip, bare
weights, our artifacts.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from mlcd.artifacts.manifest import MANIFEST, open_artifact
from mlcd.errors import ConfigInvalid
from mlcd.images.transform import PreprocessSpec
from mlcd.models.checkpoints import name_in, read_state
from mlcd.models.configs import (
    clip_preprocessing,
    read_hf_config,
    read_hf_preprocessing,
    read_open_clip_config,
)
from mlcd.models.servable import PREPROCESS, Servable, tower_of
from mlcd.models.tensor_files import read_tensors
from mlcd.models.vit import ViTConfig, resize_positions
from mlcd.models.weight_files import (
    HF_CONFIG,
    HF_PREPROCESSING,
    OPEN_CLIP_CONFIG,
    locate,
    weights_in,
)


@dataclass(frozen=True)
class Published:
    """The facts about a published tower that its bare weights do not contain.

    hub: name of its weights on the hub; None for OpenAI's files.
    """

    config: ViTConfig
    hub: str | None

    @property
    def preprocess(self) -> PreprocessSpec:
        return clip_preprocessing(self.config.image_size)


def _base(patch: int, **changes: Any) -> ViTConfig:
    return replace(ViTConfig(224, patch, 768, 12, 12, 3072, activation="quick_gelu"), **changes)


def _large(size: int, **changes: Any) -> ViTConfig:
    return replace(ViTConfig(size, 14, 1024, 24, 16, 4096, activation="quick_gelu"), **changes)


def _big_g(size: int) -> ViTConfig:
    return ViTConfig(size, 14, 1664, 48, 16, 8192, activation="gelu", positions="rope")


# The sizes are from Table 9 of the paper and the repositories' configs, the activations from the
# configs.
PUBLISHED: Final[Mapping[str, Published]] = {
    "mlcd-vit-base-patch32-224": Published(_base(32), "DeepGlint-AI/mlcd-vit-base-patch32-224"),
    "mlcd-vit-large-patch14-336": Published(_large(336), "DeepGlint-AI/mlcd-vit-large-patch14-336"),
    **{
        f"mlcd-vit-bigG-patch14-{size}": Published(
            _big_g(size), f"DeepGlint-AI/mlcd-vit-bigG-patch14-{size}"
        )
        for size in (224, 336, 448)
    },
    "rice-vit-large-patch14-560": Published(
        _large(560, activation="gelu", positions="rope"), "DeepGlint-AI/rice-vit-large-patch14-560"
    ),
    "openai-vit-base-patch32": Published(_base(32, embedding_dim=512), None),
    "openai-vit-base-patch16": Published(_base(16, embedding_dim=512), None),
    "openai-vit-large-patch14": Published(_large(224, embedding_dim=768), None),
    "openai-vit-large-patch14-336": Published(_large(336, embedding_dim=768), None),
}


Library: TypeAlias = Literal["transformers", "timm"]
LibraryPooling: TypeAlias = Literal["cls", "mean", "map", "last"]


@dataclass(frozen=True)
class LoadOptions:
    """The user's choices.

    like: name of a published tower with the sizes, activation and preprocessing of bare weights.
    clip_preprocessing: whether to use CLIP's if the directory lacks preprocessing. projection:
    False drops it. image_size: new resolution; learned positions are resized. exif: value of the
    preprocessing's field; None keeps it. library: the library that reads the model for an export
    as graphs; None for the one that its files name. pooling: of a library's image tower; None for
    the model's own.
    """

    like: str | None = None
    clip_preprocessing: bool = False
    projection: bool = True
    image_size: int | None = None
    exif: Any = None
    library: Library | None = None
    pooling: LibraryPooling | None = None

    def non_default(self) -> dict[str, Any]:
        """Returns the options that differ from the defaults, for the manifest."""
        return {
            field: value
            for field, value in asdict(self).items()
            if value != getattr(LoadOptions(), field)
        }


def load(spec: str, options: LoadOptions | None = None) -> Servable:
    """Loads the model at `spec`, in float32.

    spec: a model artifact, a directory of Hugging Face or open_clip, a file of weights
    (.safetensors, .pt, .pth, .bin), or `hub:ORGANIZATION/MODEL`.

    Raises NotFound, ArtifactInvalid naming file and tensor, ConfigInvalid naming the option that
    supplies what the files lack, and Unavailable if the hub cannot be reached.
    """
    options = options or LoadOptions()
    path = locate(spec)
    if (path / MANIFEST).is_file():
        open_artifact(path)
    model = Servable.read(path) if (path / PREPROCESS).is_file() else _load_foreign(path, options)
    return _adjust(model, options)


def _load_foreign(path: Path, options: LoadOptions) -> Servable:
    folder = path if path.is_dir() else path.parent
    weights = weights_in(path) if path.is_dir() else path
    layout, state = read_state(read_tensors(weights), str(weights))
    if options.like is not None:
        published = _find_published(options.like)
        embedding_dim = published.config.embedding_dim if "proj.weight" in state else None
        config, preprocess = (
            replace(published.config, embedding_dim=embedding_dim),
            published.preprocess,
        )
    elif (folder / OPEN_CLIP_CONFIG).is_file():
        config, preprocess = read_open_clip_config(folder / OPEN_CLIP_CONFIG)
    elif (folder / HF_CONFIG).is_file():
        config = read_hf_config(folder / HF_CONFIG, projection="proj.weight" in state)
        preprocess = _hf_preprocessing(folder, config, options)
    else:
        raise ConfigInvalid(
            f"{weights} lacks the number of heads, the activation and the preprocessing",
            remedy=f"run `mlcd export {weights} OUT --like NAME` with NAME one of "
            f"{', '.join(PUBLISHED)}; or put its config.json and preprocessor_config.json, or "
            f"{OPEN_CLIP_CONFIG}, beside it",
        )
    trunk = tower_of(config, state, str(weights), shown=lambda name: name_in(layout, name))
    if preprocess.crop != config.image_size and options.image_size is None:
        raise ConfigInvalid(
            f"preprocessing and tower need one image size, got {preprocess.crop} and"
            f" {config.image_size} in {folder}",
            remedy="choose one with `mlcd export --image-size`",
        )
    return Servable(trunk, preprocess).eval()


def _hf_preprocessing(folder: Path, config: ViTConfig, options: LoadOptions) -> PreprocessSpec:
    for name in HF_PREPROCESSING:
        if (folder / name).is_file():
            return read_hf_preprocessing(folder / name)
    if options.clip_preprocessing:
        return clip_preprocessing(config.image_size)
    raise ConfigInvalid(
        f"{folder} lacks {HF_PREPROCESSING[0]}, so its preprocessing is unknown",
        remedy=f"add the file, or `mlcd export {folder} OUT --preprocess clip` if it is CLIP's",
    )


def _find_published(name: str) -> Published:
    if name not in PUBLISHED:
        raise ConfigInvalid(f"a published tower is one of {', '.join(PUBLISHED)}, got {name}")
    return PUBLISHED[name]


def _adjust(model: Servable, options: LoadOptions) -> Servable:
    config, preprocess = model.trunk.config, model.preprocess
    state = dict(model.trunk.state_dict())
    if not options.projection and config.embedding_dim is not None:
        config = replace(config, embedding_dim=None)
        del state["proj.weight"]
    if options.exif is not None:
        preprocess = replace(preprocess, exif=options.exif)
    adjusted = Servable(tower_of(config, state, "the model"), preprocess).eval()
    return adjusted if options.image_size is None else at_resolution(adjusted, options.image_size)


def at_resolution(model: Servable, size: int) -> Servable:
    """Returns the model for images of another resolution.

    Learned positions are resized to the new grid of patches; rotary positions need no change.
    """
    config, preprocess = model.trunk.config, model.preprocess
    state = dict(model.trunk.state_dict())
    if size != preprocess.crop:
        preprocess = replace(
            preprocess,
            crop=size,
            resize_shortest=round(preprocess.resize_shortest * size / preprocess.crop),
        )
    if size != config.image_size:
        config = replace(config, image_size=size)
        if "pos" in state:
            side = size // config.patch_size
            state["pos"] = resize_positions(state["pos"], (side, side))
    return Servable(tower_of(config, state, "the model"), preprocess).eval()
