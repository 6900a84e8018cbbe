"""The starter's text tower: maps a text to a weighted mean of the classes that it resembles.

No tower was trained on pairs of images and texts. ImageNet's classes connect them: the image tower
has a classifier row for each class, and the sentence encoder embeds the class's names.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.export.bridges import Mixture
from mlcd.export.onnx_graph import GraphWriter, embedding_output, ids_input, opset_of
from mlcd.export.starter.classes import ImageClass, class_sentences
from mlcd.export.starter.sentences import add_sentence_encoder
from mlcd.types import Embeddings, unit_rows

# chosen on images that are in no published figure: docs/reference/starter.md
TEMPERATURE: Final = 0.07


def write_text_graph(
    encoder: Any, classes: list[ImageClass], classifier_KD: NDArray[np.float32]
) -> Any:
    """Returns the graph from token ids to unit rows in the space of the image tower.

    encoder: graph of the sentence encoder. classifier_KD: rows of the classifier, one per class.
    """
    graph = GraphWriter()
    sentences = add_sentence_encoder(graph, encoder, "ids")
    mixture = class_mixture(class_sentences(), classes, classifier_KD)
    graph.rename(mixture.add(graph, sentences), "embedding")
    return graph.model(
        inputs=[ids_input()],
        outputs=[embedding_output(classifier_KD.shape[1])],
        opset=opset_of(encoder),
    )


def class_mixture(
    texts_TF: Embeddings, classes: list[ImageClass], classifier_KD: NDArray[np.float32]
) -> Mixture:
    """Returns the mixture over all descriptions of all classes; classes have equal total weight."""
    counts = np.array([len(image_class.descriptions()) for image_class in classes])
    class_T = np.repeat(np.arange(len(classes)), counts)
    rows_KD = unit_rows(classifier_KD - classifier_KD.mean(axis=0))
    return Mixture(texts_TF, rows_KD[class_T], TEMPERATURE, shares=1 / counts[class_T])
