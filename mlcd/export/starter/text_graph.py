"""The starter's text tower: a text becomes a soft mixture of the classes that it resembles.

Neither tower has ever seen an image with a text. What joins them are the names of ImageNet's
classes: the image tower has a classifier's row for each of them, the sentence encoder their words.
"""

from typing import Any, Final

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from mlcd.encoders.openvino import core
from mlcd.encoders.unit_rows import MAX_BATCH
from mlcd.export.bridges import Mixture
from mlcd.export.onnx_graph import GraphWriter, embedding_output, ids_input, opset_of
from mlcd.export.starter.classes import ImageClass
from mlcd.export.starter.sentences import DIMENSION, PAD_ID, add_sentence_encoder
from mlcd.types import Embeddings, unit_rows

# chosen on images that no published figure is measured on: docs/reference/starter.md
TEMPERATURE: Final = 0.07


def write_text_graph(
    encoder: Any, tokenizer: Any, classes: list[ImageClass], classifier_KD: NDArray[np.float32]
) -> Any:
    """Returns the graph from token ids to unit rows in the space of the image tower.

    encoder: the sentence encoder's graph. classifier_KD: the classifier's rows, one a class.
    """
    graph = GraphWriter()
    sentences = add_sentence_encoder(graph, encoder, "ids")
    mixture = class_mixture(
        embed_sentences(encoder, tokenizer, _texts(classes)), classes, classifier_KD
    )
    graph.rename(mixture.add(graph, sentences), "embedding")
    return graph.model(
        inputs=[ids_input()],
        outputs=[embedding_output(classifier_KD.shape[1])],
        opset=opset_of(encoder),
    )


def class_mixture(
    texts_TF: Embeddings, classes: list[ImageClass], classifier_KD: NDArray[np.float32]
) -> Mixture:
    """Returns the mixture over all descriptions of all classes; each class has the same share."""
    counts = np.array([len(each.descriptions()) for each in classes])
    class_T = np.repeat(np.arange(len(classes)), counts)
    rows_KD = unit_rows(classifier_KD - classifier_KD.mean(axis=0))
    return Mixture(texts_TF, rows_KD[class_T], TEMPERATURE, shares=1 / counts[class_T])


def embed_sentences(encoder: Any, tokenizer: Any, texts: list[str]) -> Embeddings:
    """Returns the unit rows that the sentence encoder gives for the texts, by OpenVINO."""
    graph = GraphWriter()
    graph.rename(add_sentence_encoder(graph, encoder, "ids"), "embedding")
    model = graph.model(
        inputs=[ids_input()], outputs=[embedding_output(DIMENSION)], opset=opset_of(encoder)
    )
    config = {"INFERENCE_PRECISION_HINT": ov.Type.f32, "PERFORMANCE_HINT": "LATENCY"}
    compiled = core().compile_model(core().read_model(model.SerializeToString()), "CPU", config)
    request = compiled.create_infer_request()
    ids = np.array([each.ids for each in tokenizer.encode_batch(texts)], np.int64)
    lengths = (ids != PAD_ID).sum(axis=1)
    rows = np.empty((len(texts), DIMENSION), np.float32)
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(order), MAX_BATCH):
        batch = order[start : start + MAX_BATCH]
        rows[batch] = request.infer([ids[batch, : lengths[batch].max()]])[0]
    return rows


def _texts(classes: list[ImageClass]) -> list[str]:
    return [text for each in classes for text in each.descriptions()]
