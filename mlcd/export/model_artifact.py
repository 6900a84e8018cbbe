"""The export of a checkpoint, or of other weights, to a model artifact for the service or to
Hugging Face's layout.

Nothing is published unless the written files agree with the model. The graph is run on real images
by the engine that will serve it; Hugging Face's files are read back tensor by tensor.
"""

import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import onnx
import torch
from safetensors.torch import save_file

from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.manifest import MANIFEST, Artifact, Parent, Request, open_artifact
from mlcd.errors import ArtifactInvalid, ConfigInvalid
from mlcd.export.parity import check_parity
from mlcd.models import hub
from mlcd.models.checkpoints import write_state
from mlcd.models.configs import write_hf_config, write_hf_preprocessing
from mlcd.models.runs import find_checkpoint, holds_checkpoints, trained_images
from mlcd.models.servable import CONFIG, WEIGHTS, Servable
from mlcd.models.weight_files import digest_of_weights
from mlcd.models.zoo import LoadOptions, load
from mlcd.progress import Reporter
from mlcd.types import Fingerprint, model_name

ONNX: Final = "model.onnx"
# beside the graph: the weights that a protobuf file cannot hold (2 GiB), those of the bigG towers
EXTERNAL: Final = "model.onnx.data"
_MAX_GRAPH_BYTES: Final = 1_900_000_000
_OPSET: Final = 18


@dataclass(frozen=True)
class Weights:
    """The origin of an exported model: one of our checkpoints, or a model that
    `mlcd.models.zoo.load` takes.
    """

    parent: Parent
    # as the checkpoint's manifest states it; None where only the weights can tell
    fingerprint: Fingerprint | None
    load: Callable[[], Servable]
    centers: Path | None = None
    images: str | None = None


def find_weights(spec: str, out: Path, options: LoadOptions) -> Weights:
    """Returns the weights that `spec` names; raises NotFound, ArtifactInvalid or ConfigInvalid."""
    path = Path(spec)
    if (path / MANIFEST).is_file() and open_artifact(path, verify_files=False).kind == "model":
        model = open_artifact(path, "model")
        centers = (
            path / "centers" if "centers" in model.children and options == LoadOptions() else None
        )
        return Weights(
            model.as_parent_of(out, "model"), None, partial(load, spec, options), centers
        )
    if not holds_checkpoints(path):
        location = (
            spec if spec.startswith(hub.PREFIX) else os.path.relpath(path.resolve(), out.resolve())
        )
        return Weights(
            Parent("weights", location, digest_of_weights(spec)), None, partial(load, spec, options)
        )
    if options != LoadOptions():
        raise ConfigInvalid(
            f"{spec} is a checkpoint, which states all by itself",
            remedy="give --name and --images only",
        )
    checkpoint = find_checkpoint(path)
    trained = open_artifact(checkpoint, "checkpoint")
    read = partial(Servable.read, checkpoint / "weights")
    parent = trained.as_parent_of(out, "checkpoint")
    return Weights(
        parent, trained.fingerprint, read, checkpoint / "centers", trained_images(trained)
    )


def export_model(
    spec: str,
    out: Path,
    *,
    name: str,
    images: str | None = None,
    options: LoadOptions | None = None,
    reporter: Reporter,
) -> Artifact:
    """Writes the model artifact: weights, ONNX graph (dynamic batch), preprocessing, and centers
    where there are any.

    images: those on which parity is measured; None takes the images of the run, else scikit-learn's
    photographs. Raises ArtifactInvalid, and publishes nothing, below a cosine of 0.9999.
    """
    options = options or LoadOptions()
    weights = find_weights(spec, out, options)
    request = _request("model", weights, options, name)
    if (done := find_published(out, request)) is not None:
        return done
    model = load_weights(weights, spec)
    with Draft(out, request) as draft, reporter.stage("export", None) as meter:
        model.write(draft.path)
        with draft.write(ONNX) as path:
            write_onnx(model, path)
        meter.advance(1)
        parity = check_parity(model, draft.path / ONNX, images or weights.images, name)
        meter.advance(1, cosine=parity.min_cosine)
        if weights.centers is not None:
            draft.adopt("centers", weights.centers)
        return draft.publish(
            fingerprint=model.fingerprint(),
            summary={
                **parity.summary(),
                "dimension": model.trunk.config.output_dim,
                "weights_digest": model.weights_digest(),
            },
        )


def export_hf(
    spec: str, out: Path, *, name: str, options: LoadOptions | None = None, reporter: Reporter
) -> Artifact:
    """Writes the files that transformers' CLIPVisionModel(WithProjection) or MLCDVisionModel and
    CLIPImageProcessor load.
    """
    options = options or LoadOptions()
    weights = find_weights(spec, out, options)
    request = _request("hf", weights, options, name)
    if (done := find_published(out, request)) is not None:
        return done
    model = load_weights(weights, spec)
    config = write_hf_config(model.trunk.config)
    with Draft(out, request) as draft, reporter.stage("export", None):
        state = {
            key: tensor.contiguous()
            for key, tensor in write_state(model.trunk.state_dict(), "hf").items()
        }
        with draft.write(WEIGHTS) as path:
            save_file(state, path, metadata={"format": "pt"})
        draft.write_json(CONFIG, config)
        draft.write_json("preprocessor_config.json", write_hf_preprocessing(model.preprocess))
        again = Servable(load(str(draft.path)).trunk, model.preprocess)
        if again.fingerprint() != model.fingerprint():
            raise ArtifactInvalid(
                "the exported files do not read back as the model",
                remedy="nothing was exported; report this",
            )
        return draft.publish(fingerprint=model.fingerprint())


def _request(kind: str, weights: Weights, options: LoadOptions, name: str) -> Request:
    config = {"name": model_name(name), **chosen_options(options)}
    return Request(kind, config, (weights.parent,), weights.fingerprint)


def chosen_options(options: LoadOptions) -> dict[str, Any]:
    """Returns the options that are not the defaults, for the manifest."""
    return {
        field: value
        for field, value in asdict(options).items()
        if value != getattr(LoadOptions(), field)
    }


def load_weights(weights: Weights, spec: str) -> Servable:
    """Loads the model that `find_weights` found at `spec`; raises ArtifactInvalid where the
    manifest names another.
    """
    model = weights.load()
    if weights.fingerprint not in (None, model.fingerprint()):
        raise ArtifactInvalid(
            f"the weights in {spec} are not those of its manifest", remedy="restore it"
        )
    return model


def write_onnx(model: Servable, path: Path) -> None:
    """Writes a graph with input `image_u8` uint8 [N, 3, S, S] and output `embedding` float32 unit
    rows [N, D].
    """
    size = model.preprocess.crop
    example = torch.zeros((2, 3, size, size), dtype=torch.uint8)
    # Silences the exporter's remarks on its own internals and on packages that we do without.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model.eval(),
            (example,),
            dynamo=True,
            verbose=False,
            opset_version=_OPSET,
            input_names=["image_u8"],
            output_names=["embedding"],
            dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=65536)},),
        )
    assert program is not None
    graph = program.model_proto
    _strip_traces(graph)
    if sum(tensor.nbytes for tensor in model.state_dict().values()) < _MAX_GRAPH_BYTES:
        onnx.save(graph, path)
    else:
        onnx.save(graph, path, save_as_external_data=True, location=EXTERNAL)


def _strip_traces(graph: onnx.ModelProto) -> None:
    """Removes the source lines that the exporter records for every node: local paths, which differ
    by machine.
    """
    del graph.metadata_props[:]
    for node in graph.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for value in (*graph.graph.input, *graph.graph.output, *graph.graph.value_info):
        del value.metadata_props[:]
    del graph.graph.metadata_props[:]
    for function in graph.functions:
        del function.metadata_props[:]
        for node in function.node:
            del node.metadata_props[:]
