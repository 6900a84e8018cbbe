"""Writes the starter as a model artifact, without torch: a small model of images and texts, whose
weights come from installed packages.
"""

import hashlib
import math
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.manifest import Artifact, Parent, Request
from mlcd.export.starter.packages import IMAGES, SENTENCES, WeightsFile, require_libraries
from mlcd.locations import relative_location
from mlcd.models.text_part import FOLDER, GRAPH, SETTINGS, TOKENIZER, TextSettings, digest_of_both
from mlcd.models.weight_files import digest_of_weights
from mlcd.progress import Reporter
from mlcd.types import model_name

STARTER: Final = "starter"
ONNX: Final = "model.onnx"
PREPROCESSING: Final = "preprocess.json"
# The scale in softmax(scale * cosine). Probabilities are best calibrated at 31 on photographs of
# everyday things, and at 15 on products on white: docs/reference/starter.md
SCALE: Final = 25.0
_DATA: Final = ("imagenet_classes.tsv", "bert_uncased_vocab.txt", "class_sentences.npy")
# increased with every code change that changes an embedding
_REVISION: Final = 1


def export_starter(out: Path, *, name: str = STARTER, reporter: Reporter) -> Artifact:
    """Writes the model artifact: graph and preprocessing of the images, and the text part.

    Raises ConfigInvalid if a package is missing, ArtifactInvalid if one has different weights.
    """
    require_libraries()
    request = Request(
        "model",
        {"name": model_name(name), "starter": starter_digest()},
        (_parent(IMAGES, out), _parent(SENTENCES, out)),
    )
    if (published := find_published(out, request)) is not None:
        return published
    with Draft(out, request) as draft, reporter.stage("export", 2) as meter:
        facts = _write(draft, meter)
        return draft.publish(fingerprint=facts.pop("fingerprint"), summary=facts)


def _write(draft: Draft, meter: Any) -> dict[str, Any]:
    import onnx

    from mlcd.export.starter.classes import imagenet_classes
    from mlcd.export.starter.efficientnet_lite import DIMENSION, PREPROCESS, write_tower
    from mlcd.export.starter.sentences import (
        CONTEXT_LENGTH,
        PAD_ID,
        read_sentence_encoder,
        sentence_tokenizer,
    )
    from mlcd.export.starter.text_graph import write_text_graph
    from mlcd.export.starter.torch_file import read_state

    state = read_state(IMAGES.locate())
    with draft.write(ONNX) as path:
        onnx.save(write_tower(state), path)
    with draft.write(PREPROCESSING) as path:
        path.write_text(PREPROCESS.to_json())
    meter.advance(1)
    tokenizer = sentence_tokenizer()
    encoder = read_sentence_encoder(SENTENCES.locate())
    with draft.write(f"{FOLDER}/{GRAPH}") as path:
        graph = write_text_graph(encoder, imagenet_classes(), state["_fc.weight"])
        onnx.save(graph, path)
    with draft.write(f"{FOLDER}/{TOKENIZER}") as path:
        tokenizer.save(str(path))
    settings = TextSettings(
        tower="mixture",
        context_length=CONTEXT_LENGTH,
        pad_id=PAD_ID,
        trims_padding=True,
        dimension=DIMENSION,
        logit_scale=math.log(SCALE),
    )
    draft.write_json(f"{FOLDER}/{SETTINGS}", settings.model_dump())
    meter.advance(1)
    digest = digest_of_both(*_tower_digests())
    return {
        "fingerprint": PREPROCESS.fingerprint(digest),
        "dimension": DIMENSION,
        "weights_digest": digest,
    }


def starter_digest() -> str:
    """Returns the digest of the starter's weights, without reading the packages."""
    return digest_of_both(*_tower_digests())


def _tower_digests() -> tuple[str, str]:
    """Returns the digest of each tower, computed from its sources."""
    data = [files("mlcd.export.starter").joinpath(name).read_bytes() for name in _DATA]
    parts = [SENTENCES.sha256, *(hashlib.sha256(content).hexdigest() for content in data)]
    images = f"starter {_REVISION} {IMAGES.sha256}"
    texts = f"{images} {' '.join(parts)}"
    return hashlib.sha256(images.encode()).hexdigest(), hashlib.sha256(texts.encode()).hexdigest()


def _parent(weights: WeightsFile, out: Path) -> Parent:
    file = weights.locate()
    return Parent("weights", relative_location(file, out), digest_of_weights(str(file)))
