"""The rows of the classes' descriptions that the starter ships, made from its sentence encoder.

    python -m tests.starter_sentences

writes them anew, which a change of the descriptions or of the encoder's package needs. Embedding
them takes ten seconds, which would be the first ten of a person who only wants to see her pictures.
"""

from importlib.resources import files

import numpy as np

from mlcd.encoders.openvino import core
from mlcd.export.onnx_graph import GraphWriter, embedding_output, ids_input, opset_of
from mlcd.export.starter.classes import SENTENCES_FILE, class_descriptions
from mlcd.export.starter.packages import SENTENCES
from mlcd.export.starter.sentences import (
    DIMENSION,
    PAD_ID,
    add_sentence_encoder,
    read_sentence_encoder,
    sentence_tokenizer,
)

_BATCH = 32


def embed_sentences(texts):
    """Returns the unit rows that the sentence encoder gives for the texts, by OpenVINO."""
    encoder = read_sentence_encoder(SENTENCES.locate())
    graph = GraphWriter()
    graph.rename(add_sentence_encoder(graph, encoder, "ids"), "embedding")
    model = graph.model(
        inputs=[ids_input()], outputs=[embedding_output(DIMENSION)], opset=opset_of(encoder)
    )
    config = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    compiled = core().compile_model(core().read_model(model.SerializeToString()), "CPU", config)
    request = compiled.create_infer_request()
    ids = np.array([each.ids for each in sentence_tokenizer().encode_batch(texts)], np.int64)
    lengths = (ids != PAD_ID).sum(axis=1)
    rows = np.empty((len(texts), DIMENSION), np.float32)
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(order), _BATCH):
        batch = order[start : start + _BATCH]
        rows[batch] = request.infer([ids[batch, : lengths[batch].max()]])[0]
    return rows


if __name__ == "__main__":
    np.save(
        str(files("mlcd.export.starter").joinpath(SENTENCES_FILE)),
        embed_sentences(class_descriptions()).astype(np.float16),
    )
