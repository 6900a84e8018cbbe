"""A checkpoint to a model artifact (what is served), and a model artifact to a Triton repository.

Nothing is published unless the exported graph, run by the engine that will serve it, agrees with the trained
model on real images.
"""

import logging
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import torch
from PIL import Image

from mlcd.artifact import Artifact, Draft, Request, find_published, open_artifact
from mlcd.encoders.openvino import OpenVinoEncoder, read_onnx
from mlcd.errors import ArtifactInvalid, ImageRejected, InvalidInput
from mlcd.images.sources import open_source
from mlcd.images.transform import PreprocessSpec
from mlcd.models.checkpoints import find_checkpoint, trained_images
from mlcd.models.servable import CONFIG, PREPROCESS, WEIGHTS, Servable
from mlcd.progress import Reporter
from mlcd.types import ImageBatch, model_name

ONNX: Final = "model.onnx"
MIN_COSINE: Final = 0.9999
_NUM_PARITY_IMAGES: Final = 64
_OPSET: Final = 18


@dataclass(frozen=True)
class Parity:
    """min_cosine: the worst agreement over the images. source: where they came from."""

    min_cosine: float
    num_images: int
    source: str


def export_model(checkpoint: Path, out: Path, *, name: str, images: str | None, reporter: Reporter) -> Artifact:
    """Write the model artifact: weights, ONNX graph (dynamic batch), preprocessing and centers.

    images: what parity is measured on; None takes the images of the run, else scikit-learn's photographs.
    Raises ArtifactInvalid, and publishes nothing, below a cosine of 0.9999.
    """
    checkpoint = find_checkpoint(checkpoint)
    trained = open_artifact(checkpoint, "checkpoint")
    request = Request(
        "model", {"name": model_name(name)}, (trained.as_parent_of(out, "checkpoint"),), trained.fingerprint
    )
    if (done := find_published(out, request)) is not None:
        return done
    model = Servable.read(checkpoint / "weights")
    if model.fingerprint() != trained.fingerprint:
        raise ArtifactInvalid(f"the weights in {checkpoint} are not those of its manifest", remedy="restore it")
    with Draft(out, request) as draft, reporter.stage("export", None) as meter:
        for file in (WEIGHTS, CONFIG, PREPROCESS):
            with draft.write(file) as path:
                shutil.copyfile(checkpoint / "weights" / file, path)
        with draft.write(ONNX) as path:
            write_onnx(model, path)
        meter.advance(1)
        parity = _check_parity(model, draft.path / ONNX, images or trained_images(trained), name)
        meter.advance(1, cosine=parity.min_cosine)
        draft.adopt("centers", checkpoint / "centers")
        return draft.publish(
            summary={
                "parity_min_cosine": parity.min_cosine,
                "parity_images": parity.num_images,
                "parity_source": parity.source,
                "dimension": model.trunk.config.output_dim,
            }
        )


def export_triton(model: Path, out: Path, reporter: Reporter, *, max_batch: int = 64) -> Artifact:
    """Write a Triton model repository, OUT/<name>/1/model.onnx and config.pbtxt, from a model artifact."""
    source = open_artifact(model, "model")
    name = model_name(source.config["name"])
    parents = (source.as_parent_of(out, "model"),)
    request = Request("triton", {"name": name, "max_batch": max_batch}, parents, source.fingerprint)
    if (done := find_published(out, request)) is not None:
        return done
    with Draft(out, request) as draft, reporter.stage("export", None):
        with draft.write(f"{name}/1/{ONNX}") as path:
            shutil.copyfile(source.file(ONNX), path)
        with draft.write(f"{name}/config.pbtxt") as path:
            path.write_text(_triton_config(source, max_batch))
        return draft.publish()


def write_onnx(model: Servable, path: Path) -> None:
    """Input `image_u8` uint8 [N, 3, S, S], output `embedding` float32 unit rows [N, D]."""
    size = model.preprocess.crop
    example = torch.zeros((2, 3, size, size), dtype=torch.uint8)
    # The exporter's remarks on its own internals and on packages that we do without.
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
    onnx.save(graph, path)


def _strip_traces(graph: onnx.ModelProto) -> None:
    """The exporter records the source lines of every node: local paths, and different bytes on every machine."""
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


def _check_parity(model: Servable, path: Path, images: str | None, name: str) -> Parity:
    batch, source = _parity_images(model, images)
    encoder = OpenVinoEncoder(read_onnx(path), name=name, fingerprint="", preprocess=model.preprocess)
    try:
        served = np.concatenate([encoder.encode(batch[:1]), encoder.encode(batch[1:])])
    finally:
        encoder.close()
    with torch.inference_mode():
        trained = model(torch.from_numpy(batch)).numpy()
    worst = float((served.astype(np.float64) * trained.astype(np.float64)).sum(axis=1).min())
    if not worst >= MIN_COSINE:
        raise ArtifactInvalid(
            f"the exported model differs from the trained one: cosine {worst:.6f} on an image of {source},"
            f" below {MIN_COSINE}",
            remedy="nothing was exported; report this with the versions that `pip freeze` prints",
        )
    return Parity(worst, len(batch), source)


def _parity_images(model: Servable, images: str | None) -> tuple[ImageBatch, str]:
    if images is None:
        from sklearn.datasets import load_sample_images

        pictures: Sequence[np.ndarray] = load_sample_images().images
        return np.stack([model.preprocess.apply(Image.fromarray(picture)) for picture in pictures]), "scikit-learn"
    source = open_source(images)
    prepared: list[np.ndarray] = []
    for entry in source.entries[:: max(1, len(source.entries) // _NUM_PARITY_IMAGES)]:
        try:
            prepared.append(model.preprocess.prepare(source.read(entry)))
        except ImageRejected:
            continue
    if not prepared:
        raise InvalidInput(f"no image of {images} can be decoded", remedy="give others with --images")
    return np.stack(prepared[:_NUM_PARITY_IMAGES]), images


def _triton_config(model: Artifact, max_batch: int) -> str:
    """config.pbtxt; see docs/reference/triton.md for why each line is there."""
    preprocess = PreprocessSpec.read(model.file(PREPROCESS))
    size = preprocess.crop
    warmups = "".join(
        f"""
  {{ name: "batch_{batch}" batch_size: {batch} inputs {{ key: "image_u8" value {{
      data_type: TYPE_UINT8 dims: [ 3, {size}, {size} ] random_data: true }} }} }}"""
        + ("," if batch == 1 else "")
        for batch in (1, max_batch)
    )
    return f"""name: "{model.config["name"]}"
backend: "onnxruntime"
max_batch_size: {max_batch}
input [ {{ name: "image_u8" data_type: TYPE_UINT8 dims: [ 3, {size}, {size} ] }} ]
output [ {{ name: "embedding" data_type: TYPE_FP32 dims: [ {model.summary["dimension"]} ] }} ]
instance_group [ {{ count: 1 }} ]
dynamic_batching {{
  max_queue_delay_microseconds: 500
  default_queue_policy {{
    timeout_action: REJECT
    default_timeout_microseconds: 5000000
    allow_timeout_override: true
    max_queue_size: 256
  }}
}}
model_warmup [{warmups}
]
parameters {{ key: "fingerprint" value: {{ string_value: "{model.fingerprint}" }} }}
parameters {{ key: "preprocess_version" value: {{ string_value: "{preprocess.version}" }} }}
"""
