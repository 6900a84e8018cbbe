"""Chooses the library that reads a model, and exports the model that it reads."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from mlcd.artifacts.draft import find_published
from mlcd.artifacts.manifest import MANIFEST, Artifact, Parent, Request
from mlcd.errors import ConfigInvalid
from mlcd.export.traced_model import TracedModel, export_traced
from mlcd.extras import install_command
from mlcd.locations import relative_location
from mlcd.models import hub
from mlcd.models.configs import OUR_MODEL_TYPES
from mlcd.models.json_files import read_object
from mlcd.models.runs import holds_checkpoints
from mlcd.models.text_part import TOKENIZER
from mlcd.models.weight_files import HF_CONFIG, OPEN_CLIP_CONFIG, digest_of_weights, locate
from mlcd.models.zoo import Library, LoadOptions
from mlcd.progress import Reporter
from mlcd.types import model_name


def choose_library(spec: str, options: LoadOptions) -> Library | None:
    """Returns the library that reads the model at `spec`, None for our own readers.

    Raises ConfigInvalid for options that its reader does not have.
    """
    library = options.library or _find_library(spec, options)
    if library is None and options.pooling is not None:
        raise ConfigInvalid(
            f"--pooling is for a model that a library reads, and {spec} is read without one",
            remedy="add --with transformers, or leave it out",
        )
    if library is not None and options.like is not None:
        raise ConfigInvalid(
            f"--like is for bare weights, and {library} reads a directory with its config.json",
            remedy="leave out --like",
        )
    return library


def _find_library(spec: str, options: LoadOptions) -> Library | None:
    is_ours = holds_checkpoints(Path(spec)) or (Path(spec) / MANIFEST).is_file()
    if is_ours or options.like is not None:
        return None
    folder = locate(spec)
    if (folder / OPEN_CLIP_CONFIG).is_file() or not (folder / HF_CONFIG).is_file():
        return None
    config = read_object(folder / HF_CONFIG)
    if config.get("model_type") is not None:
        return None if str(config["model_type"]) in OUR_MODEL_TYPES else "transformers"
    return "timm" if "architecture" in config else None


def export_library_model(
    spec: str,
    out: Path,
    library: Library,
    *,
    name: str,
    images: str | None,
    options: LoadOptions,
    text: bool,
    reporter: Reporter,
) -> Artifact:
    """Writes the model artifact of a directory, or `hub:ORGANIZATION/MODEL`, that a library reads.

    Raises ConfigInvalid if the library is not installed or the model needs another option.
    """
    if find_spec(library) is None:
        raise ConfigInvalid(
            f"{spec} needs the package {library}, which is not installed",
            remedy=install_command("models"),
        )
    folder = locate(spec)
    if not folder.is_dir():
        raise ConfigInvalid(f"{library} reads a directory with its config.json, got {spec}")
    options = replace(options, library=library)
    # in another pooling, images lie in a different space than texts
    text = text and options.projection and options.pooling is None
    text = text and (folder / TOKENIZER).is_file()
    request = Request(
        "model",
        {"name": model_name(name), **options.non_default(), **({"text": True} if text else {})},
        (library_parent(spec, out),),
    )
    if (published := find_published(out, request)) is not None:
        return published
    model = _read(folder, library, options, text=text)
    return export_traced(model, out, request, images=images, reporter=reporter)


def library_parent(spec: str, out: Path) -> Parent:
    """Returns the identity of a model's files, with their place as seen from `out`."""
    location = spec if spec.startswith(hub.PREFIX) else relative_location(locate(spec), out)
    return Parent("weights", location, digest_of_weights(spec))


def _read(folder: Path, library: Library, options: LoadOptions, *, text: bool) -> TracedModel:
    try:
        if library == "timm":
            from mlcd.export.timm_towers import read_timm
        else:
            from mlcd.export.transformers_towers import read_transformers
    except Exception as error:  # torchvision of another build raises a RuntimeError
        raise ConfigInvalid(
            f"{library} cannot be imported: {error}",
            remedy="install torch and torchvision of one build: both from PyPI, or both from"
            " PyTorch's index",
        ) from error
    if library == "timm":
        return read_timm(folder, options)
    return read_transformers(folder, options, text=text)
