"""The starter's sentence encoder: all-MiniLM-L6-v2, whose graph and vocabulary become ours.

The package's graph holds weights of 8 bits with a scale for each channel, and computes in float32.
Here the weights are multiplied out: an engine that sees 8 bits may round activations, too, and
then a text's row depends on the CPU.
"""

from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import numpy_helper

from mlcd.export.onnx_graph import GraphWriter

CONTEXT_LENGTH: Final = 256  # the longest that sentence-transformers gives this encoder
DIMENSION: Final = 384
PAD_ID: Final = 0
_VOCABULARY: Final = "bert_uncased_vocab.txt"


def read_sentence_encoder(path: Path) -> Any:
    """Returns the package's graph, from ids, mask and segments to the state of every token, with
    weights of float32.
    """
    model = onnx.load(path)
    graph = model.graph
    constants = {entry.name: entry for entry in graph.initializer}
    casts = {entry.output[0]: entry for entry in graph.node if entry.input[0] in constants}
    for product in [entry for entry in graph.node if entry.op_type == "Mul"]:
        cast = casts.get(product.input[0])
        if cast is None or cast.op_type != "Cast" or product.input[1] not in constants:
            continue
        rounded, scale = (constants.pop(entry) for entry in (cast.input[0], product.input[1]))
        value = numpy_helper.to_array(rounded) * numpy_helper.to_array(scale)
        name = product.output[0]
        constants[name] = numpy_helper.from_array(value.astype(np.float32), name)
        graph.node.remove(cast)
        graph.node.remove(product)
    del graph.initializer[:]
    graph.initializer.extend(constants.values())
    return model


def add_sentence_encoder(graph: GraphWriter, encoder: Any, ids: str) -> str:
    """Adds the encoder and its pooling to a graph; returns the unit rows of the sentences.

    encoder: the graph that `read_sentence_encoder` returns.
    """
    is_token = graph.add("Not", graph.add("Equal", ids, graph.integers(PAD_ID)))
    mask = graph.add("Cast", is_token, to=onnx.TensorProto.INT64)
    segments = graph.add("Mul", ids, graph.integers(0))
    (states,) = graph.include(
        encoder,
        "sentence",
        {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments},
    )
    weights = graph.add(
        "Unsqueeze",
        graph.add("Cast", is_token, to=onnx.TensorProto.FLOAT),
        graph.integers(-1),
    )
    # the direction of a sum is that of the mean
    total = graph.add("ReduceSum", graph.add("Mul", states, weights), graph.integers(1), keepdims=0)
    return graph.unit_rows(total)


def sentence_tokenizer(context_length: int = CONTEXT_LENGTH) -> Any:
    """Returns BERT's uncased tokenizer, which cuts to a length and pads on the right."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    words = files("mlcd.export.starter").joinpath(_VOCABULARY).read_text(encoding="utf-8")
    vocabulary = {word: number for number, word in enumerate(words.split("\n")[:-1])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))  # noqa: S106
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    ends = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    tokenizer.enable_truncation(context_length)
    tokenizer.enable_padding(length=context_length, pad_id=PAD_ID, pad_token="[PAD]")  # noqa: S106
    return tokenizer
