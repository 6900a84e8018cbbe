"""Gives a model without a text tower another model's text tower, followed by a bridge.

The image towers of both models embed the same images, the pivots. The bridge is fitted to these
pairs of rows. The other model's text graph and the bridge become one graph.
"""

import math
import shutil
from collections.abc import Callable
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.manifest import MANIFEST, Artifact, Parent, Request, open_artifact
from mlcd.cores import available_cores
from mlcd.encoders import has_text, open_encoder, open_text_encoder
from mlcd.encoders.local_text import TextPart
from mlcd.encoders.openvino import open_text
from mlcd.encoders.text_encoder import TextEncoder
from mlcd.errors import ArtifactInvalid, ConfigInvalid
from mlcd.export.bridge_fit import BridgeKind, FittedBridge, Pivots, fit_bridge
from mlcd.export.onnx_graph import GraphWriter, embedding_output, ids_input, opset_of
from mlcd.images.entries import Entries
from mlcd.images.source import Source
from mlcd.images.sources import open_source
from mlcd.images.transform import PreprocessSpec
from mlcd.keys import split_positions
from mlcd.locations import relative_location
from mlcd.models.text_part import (
    FOLDER,
    GRAPH,
    SETTINGS,
    TOKENIZER,
    TextSettings,
    digest_of_both,
    text_digest,
)
from mlcd.pipelines.encoded import EncodedPart, check_source, encode_entries, images_parent
from mlcd.pipelines.resolve import resolve_model
from mlcd.progress import Reporter
from mlcd.types import Embeddings, Fingerprint, model_name

_CENTERS: Final = "centers"
# prefixes of facts about the image tower, which the bridge does not change
_IMAGE_FACTS: Final = ("parity_", "int8_")
_MAX_PIVOTS: Final = 4096  # a mixture's graph contains two rows per pivot, one of each space
_MIN_COSINE: Final = 0.9999


def bridge_model(
    spec: str,
    out: Path,
    *,
    text_from: str,
    kind: BridgeKind,
    images: str,
    name: str | None = None,
    announce: Callable[[str], None] = lambda _: None,
    reporter: Reporter,
) -> Artifact:
    """Writes a model artifact with the image tower of `spec` and the bridged text tower of
    `text_from`.

    images: the pivots; if they have classes (one folder per class), the class names also help to
    choose and measure the bridge. Raises ConfigInvalid if `spec` has a text tower already or
    `text_from` has none, InvalidInput for too few images.
    """
    model = _open_model(spec, resolve_model(spec, announce))
    texts = _open_texts(text_from, resolve_model(text_from, announce))
    source = open_source(images)
    check_source(source, out)
    parents = (
        model.as_parent_of(out, "model"),
        texts.as_parent_of(out, "text"),
        images_parent(source, out),
    )
    out_name = model_name(name or model.config.get("name"))
    request = Request("model", {"name": out_name, "bridge": kind}, parents)
    if (done := find_published(out, request)) is not None:
        return done
    with Draft(out, request) as draft:
        fitted = _fit_bridge(kind, model, texts, source, reporter)
        _copy_image_tower(model, draft)
        settings = _write_text(draft, texts, fitted, kind, dimension=model.summary["dimension"])
        digest = digest_of_both(model.summary["weights_digest"], text_digest(draft.path / FOLDER))
        preprocess = PreprocessSpec.read(draft.path / "preprocess.json")
        fingerprint = preprocess.fingerprint(digest)
        if _CENTERS in model.children:
            _write_centers(model.path / _CENTERS, draft, fingerprint)
        summary = {
            "dimension": settings.dimension,
            "weights_digest": digest,
            **{key: value for key, value in model.summary.items() if key.startswith(_IMAGE_FACTS)},
            **fitted.facts,
        }
        return draft.publish(fingerprint=fingerprint, summary=summary)


def _open_model(spec: str, path: str) -> Artifact:
    if not (Path(path) / MANIFEST).is_file():
        raise ConfigInvalid(
            f"a bridge needs a model artifact or weights, got {spec}",
            remedy="give a model that `mlcd export` takes",
        )
    if has_text(path):
        raise ConfigInvalid(
            f"{spec} has a text tower already",
            remedy=f"leave it out with `mlcd export {spec} OUT --no-text`, and give OUT",
        )
    return open_artifact(Path(path), "model")


def _open_texts(spec: str, path: str) -> Artifact:
    if not has_text(path):
        raise ConfigInvalid(
            f"--text needs a model with a text tower, got {spec}",
            remedy="give a model of images and texts, for example starter",
        )
    return open_artifact(Path(path), "model")


def _fit_bridge(
    kind: BridgeKind, model: Artifact, texts: Artifact, source: Source, reporter: Reporter
) -> FittedBridge:
    entries = _select_pivots(source.entries)
    with reporter.stage("pivots", 2 * len(entries)) as meter:

        def embed(artifact: Artifact) -> EncodedPart:
            with closing(open_encoder(str(artifact.path))) as encoder:
                return encode_entries(
                    source,
                    entries,
                    encoder,
                    num_threads=available_cores(),
                    on_done=lambda *_: meter.advance(1),
                )

        target_part, source_part = embed(model), embed(texts)
    with closing(open_text_encoder(str(texts.path))) as encoder:
        return fit_bridge(kind, _build_pivots(target_part, source_part, encoder))


def _select_pivots(entries: Entries) -> list[Any]:
    """Returns the pivots: all images, or _MAX_PIVOTS of them, spread evenly over the classes."""
    if len(entries) <= _MAX_PIVOTS:
        return list(entries)
    positions = split_positions(entries.keys(), entries.class_names())
    places = np.linspace(0, len(entries) - 1, _MAX_PIVOTS).astype(np.int64)
    return [entries[int(index)] for index in np.sort(np.argsort(positions)[places])]


def _build_pivots(
    target_part: EncodedPart, source_part: EncodedPart, encoder: TextEncoder
) -> Pivots:
    row_of = {entry.key: row for row, entry in enumerate(source_part.entries)}
    shared_rows = [row for row, entry in enumerate(target_part.entries) if entry.key in row_of]
    entries = [target_part.entries[row] for row in shared_rows]
    classes = sorted({entry.class_name for entry in entries if entry.class_name is not None})
    class_ids = {name: number for number, name in enumerate(classes)}
    return Pivots(
        source=source_part.embeddings[[row_of[entry.key] for entry in entries]],
        target=target_part.embeddings[shared_rows],
        positions=split_positions(
            (entry.key for entry in entries), (entry.class_name for entry in entries)
        ),
        class_of=np.array([class_ids.get(entry.class_name or "", -1) for entry in entries]),
        names=_embed(encoder, [f"a photo of a {_to_words(name)}" for name in classes]),
        text_mean=_embed(encoder, _read_captions()).mean(axis=0),
    )


def _to_words(class_name: str) -> str:
    return class_name.replace("_", " ").lower()


def _read_captions() -> list[str]:
    """Returns captions of many subjects; their mean represents texts in general."""
    text = files("mlcd.export").joinpath("captions.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line]


def _embed(encoder: TextEncoder, texts: list[str]) -> Embeddings:
    if not texts:
        return np.zeros((0, encoder.dimension), np.float32)
    return encoder.encode(encoder.tokenizer(texts))


def _copy_image_tower(model: Artifact, draft: Draft) -> None:
    for name in model.files:
        if not draft.has(name):
            with draft.write(name) as path:
                shutil.copyfile(model.file(name), path)


def _write_text(
    draft: Draft, texts: Artifact, fitted: FittedBridge, kind: BridgeKind, *, dimension: int
) -> TextSettings:
    """Writes `text/`. Raises ArtifactInvalid if its graph gives other rows than applying the bridge
    to the rows of the other model's text tower.
    """
    folder = texts.file(f"{FOLDER}/{SETTINGS}").parent
    text_settings = TextSettings.read(folder)
    inner = onnx.load(folder / GRAPH)
    graph = GraphWriter()
    (rows,) = graph.include(inner, "texts", {"ids": "ids"})
    graph.rename(fitted.bridge.add(graph, rows), "embedding")
    composed = graph.model(
        inputs=[ids_input()], outputs=[embedding_output(dimension)], opset=opset_of(inner)
    )
    with draft.write(f"{FOLDER}/{GRAPH}") as path:
        onnx.save(composed, path)
    with draft.write(f"{FOLDER}/{TOKENIZER}") as path:
        shutil.copyfile(folder / TOKENIZER, path)
    settings = TextSettings(
        tower=kind,
        context_length=text_settings.context_length,
        pad_id=text_settings.pad_id,
        trims_padding=text_settings.trims_padding,
        dimension=dimension,
        logit_scale=math.log(fitted.scale),
    )
    draft.write_json(f"{FOLDER}/{SETTINGS}", settings.model_dump())
    with closing(open_text_encoder(str(texts.path))) as encoder:
        expected = fitted.bridge.apply(_embed(encoder, _read_captions()))
        part = TextPart("text", "", draft.path / FOLDER, settings, encoder.tokenizer)
        with closing(open_text(part)) as composed_encoder:
            served = _embed(composed_encoder, _read_captions())
    lowest = float((served * expected).sum(axis=1).min())
    if not lowest >= _MIN_COSINE:
        raise ArtifactInvalid(
            "the exported text graph must agree with the bridge to a cosine of at least"
            f" {_MIN_COSINE}, got {lowest:.6f}",
            remedy="nothing was exported; report this with the versions that `pip freeze` prints",
        )
    return settings


def _write_centers(path: Path, draft: Draft, fingerprint: Fingerprint) -> None:
    """Writes the model's centers with the new fingerprint; the image embeddings are the same."""
    before = open_artifact(path, "centers")
    out = draft.out / _CENTERS
    parent = Parent("centers", relative_location(path, out), before.digest)
    request = Request("centers", before.config, (parent,), fingerprint)
    if (draft.path / _CENTERS).is_dir():
        return
    with Draft(draft.path / _CENTERS, request) as centers:
        Centers.read(before).write(centers)
        centers.publish(summary=before.summary)
