"""Exports a checkpoint, or other weights, to a model artifact for the service or to Hugging Face's
layout.

Nothing is published unless the written files agree with the model: the serving engine runs the
graph on real images, and Hugging Face's files are read back and compared by fingerprint.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from safetensors.torch import save_file

from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.manifest import MANIFEST, Artifact, Parent, Request, open_artifact
from mlcd.errors import ArtifactInvalid, ConfigInvalid
from mlcd.export.graph import ONNX, write_image_graph
from mlcd.export.libraries import choose_library, export_library_model
from mlcd.export.parity import check_parity
from mlcd.export.text_tower import (
    TextOrigin,
    find_text,
    text_of_artifact,
    write_hf_both,
    write_text,
)
from mlcd.locations import relative_location
from mlcd.models import hub
from mlcd.models.checkpoints import write_state
from mlcd.models.configs import write_hf_config, write_hf_preprocessing
from mlcd.models.runs import find_checkpoint, find_training_images, holds_checkpoints
from mlcd.models.servable import CONFIG, WEIGHTS, Servable
from mlcd.models.servable_text import ServableText
from mlcd.models.text_part import FOLDER, digest_of_both, text_digest
from mlcd.models.weight_files import digest_of_weights
from mlcd.models.zoo import LoadOptions, load
from mlcd.progress import Reporter
from mlcd.types import Fingerprint, model_name

_TEXT_PARITY: Final = "text_parity_min_cosine"  # absent if the text graph was copied


@dataclass(frozen=True)
class Weights:
    """The origin of an exported model: one of our checkpoints, or a model that
    `mlcd.models.zoo.load` reads.
    """

    parent: Parent
    # from the checkpoint's manifest; None if it can only be computed from the weights
    fingerprint: Fingerprint | None
    # None for graphs without weights
    load: Callable[[], Servable] | None
    centers: Path | None = None
    images: str | None = None
    text: TextOrigin | None = None


def find_weights(spec: str, out: Path, options: LoadOptions, *, text: bool = True) -> Weights:
    """Returns the weights of `spec`; raises NotFound, ArtifactInvalid or ConfigInvalid.

    text: whether to include the text tower, if there is one.
    """
    weights = _find_weights(spec, out, options)
    return weights if text else replace(weights, text=None)


def _find_weights(spec: str, out: Path, options: LoadOptions) -> Weights:
    path = Path(spec)
    if (path / MANIFEST).is_file() and open_artifact(path, verify_files=False).kind == "model":
        model = open_artifact(path, "model")
        centers = (
            path / "centers" if "centers" in model.children and options == LoadOptions() else None
        )
        return Weights(
            model.as_parent_of(out, "model"),
            None,
            partial(load, spec, options) if WEIGHTS in model.files else None,
            centers,
            text=text_of_artifact(model) if options.projection else None,
        )
    if not holds_checkpoints(path):
        if (library := choose_library(spec, options)) is not None:
            raise ConfigInvalid(
                f"{spec} is a model that {library} reads, of which mlcd exports graphs alone",
                remedy="export it with --format onnx or triton; start trainings from CLIP, MLCD or"
                " a run of your own",
            )
        location = spec if spec.startswith(hub.PREFIX) else relative_location(path, out)
        return Weights(
            Parent("weights", location, digest_of_weights(spec)),
            None,
            partial(load, spec, options),
            text=find_text(spec, options),
        )
    if options != LoadOptions():
        raise ConfigInvalid(
            f"{spec} is a checkpoint, which has its own config and preprocessing",
            remedy="give only --name and --images",
        )
    checkpoint = find_checkpoint(path)
    artifact = open_artifact(checkpoint, "checkpoint")
    text = checkpoint / FOLDER
    return Weights(
        artifact.as_parent_of(out, "checkpoint"),
        artifact.fingerprint,
        partial(Servable.read, checkpoint / "weights"),
        checkpoint / "centers" if "centers" in artifact.children else None,
        find_training_images(artifact),
        TextOrigin(partial(ServableText.read, text)) if text.is_dir() else None,
    )


def export_model(
    spec: str,
    out: Path,
    *,
    name: str,
    images: str | None = None,
    options: LoadOptions | None = None,
    text: bool = True,
    reporter: Reporter,
) -> Artifact:
    """Writes the model artifact: weights, ONNX graph (dynamic batch), preprocessing, and, if there
    are any, centers and the text tower.

    images: images for the check of parity; None takes the run's images, or without a run
    scikit-learn's photographs. text: False omits the text tower. A model that a library reads is
    written as graphs without weights. Raises ArtifactInvalid, and publishes nothing, if a cosine is
    below 0.9999.
    """
    options = options or LoadOptions()
    if (library := choose_library(spec, options)) is not None:
        return export_library_model(
            spec,
            out,
            library,
            name=name,
            images=images,
            options=options,
            text=text,
            reporter=reporter,
        )
    weights = find_weights(spec, out, options, text=text)
    request = _request("model", weights, options, name)
    if (published := find_published(out, request)) is not None:
        return published
    model = load_weights(weights, spec)
    with Draft(out, request) as draft, reporter.stage("export", None) as meter:
        model.write(draft.path)
        with draft.write(ONNX) as path:
            write_image_graph(model, model.preprocess.crop, path)
        meter.advance(1)
        parity = check_parity(model, draft.path / ONNX, images or weights.images, name)
        meter.advance(1, cosine=parity.min_cosine)
        if weights.centers is not None:
            draft.adopt("centers", weights.centers)
        digest, facts = model.weights_digest(), dict[str, Any]()
        if weights.text is not None:
            (part := draft.path / FOLDER).mkdir(exist_ok=True)
            facts = write_text(weights.text, part, name)
            text_parity = {"text_cosine": facts[_TEXT_PARITY]} if _TEXT_PARITY in facts else {}
            meter.advance(1, **text_parity)
            digest = digest_of_both(digest, text_digest(part))
        return draft.publish(
            fingerprint=model.preprocess.fingerprint(digest),
            summary={
                **parity.summary(),
                **facts,
                "dimension": model.trunk.config.output_dim,
                "weights_digest": digest,
            },
        )


def export_hf(
    spec: str,
    out: Path,
    *,
    name: str,
    options: LoadOptions | None = None,
    text: bool = True,
    reporter: Reporter,
) -> Artifact:
    """Writes files for transformers: with a text tower, of CLIPModel and its processors; otherwise
    of CLIPVisionModel(WithProjection) or MLCDVisionModel and their image processor.

    text: False omits the text tower.
    """
    options = options or LoadOptions()
    weights = find_weights(spec, out, options, text=text)
    request = _request("hf", weights, options, name)
    if (published := find_published(out, request)) is not None:
        return published
    model = load_weights(weights, spec)
    with Draft(out, request) as draft, reporter.stage("export", None):
        digest = model.weights_digest()
        if weights.text is None:
            _write_hf_images(model, draft)
        else:
            digest = digest_of_both(digest, write_hf_both(model, weights.text, draft.path))
        reloaded = Servable(load(str(draft.path)).trunk, model.preprocess)
        if reloaded.fingerprint() != model.fingerprint():
            raise ArtifactInvalid(
                "the exported files differ from the model when they are read back",
                remedy="nothing was exported; report this",
            )
        return draft.publish(fingerprint=model.preprocess.fingerprint(digest))


def _write_hf_images(model: Servable, draft: Draft) -> None:
    config = write_hf_config(model.trunk.config)
    state = {
        key: tensor.contiguous()
        for key, tensor in write_state(model.trunk.state_dict(), "hf").items()
    }
    with draft.write(WEIGHTS) as path:
        save_file(state, path, metadata={"format": "pt"})
    draft.write_json(CONFIG, config)
    draft.write_json("preprocessor_config.json", write_hf_preprocessing(model.preprocess))


def _request(kind: str, weights: Weights, options: LoadOptions, name: str) -> Request:
    config = {"name": model_name(name), **options.non_default()}
    if weights.text is not None:
        config["text"] = True
    return Request(kind, config, (weights.parent,), weights.fingerprint)


def load_weights(weights: Weights, spec: str) -> Servable:
    """Loads the weights that `find_weights` found at `spec`; raises ArtifactInvalid if they do not
    have the manifest's fingerprint, ConfigInvalid for graphs without weights.
    """
    if weights.load is None:
        raise ConfigInvalid(
            f"{spec} has graphs without weights, which can only be used as they are",
            remedy="use the model artifact itself, or give the weights that it was made from",
        )
    model = weights.load()
    if weights.fingerprint not in (None, model.fingerprint()):
        raise ArtifactInvalid(
            f"the weights in {spec} do not have the fingerprint of its manifest",
            remedy="restore it",
        )
    return model
