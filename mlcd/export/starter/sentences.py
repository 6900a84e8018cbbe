"""The starter's sentence encoder: the graph and vocabulary of all-MiniLM-L6-v2.

The package's graph has 8-bit weights with a scale per channel, and computes in float32. This module
converts the weights to float32: an engine that sees 8-bit weights may also round activations, and
then a text's row depends on the CPU.
"""

from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import numpy_helper

from mlcd.export.onnx_graph import GraphWriter

CONTEXT_LENGTH: Final = 256  # the limit of sentence-transformers for this encoder
DIMENSION: Final = 384
PAD_ID: Final = 0
_VOCABULARY: Final = "bert_uncased_vocab.txt"


def read_sentence_encoder(path: Path) -> Any:
    """Returns the package's graph with float32 weights: from ids, mask and segments to the state of
    every token.
    """
    model = onnx.load(path)
    graph = model.graph
    constants = {entry.name: entry for entry in graph.initializer}
    casts = {entry.output[0]: entry for entry in graph.node if entry.input[0] in constants}
    for product in [entry for entry in graph.node if entry.op_type == "Mul"]:
        cast = casts.get(product.input[0])
        if cast is None or cast.op_type != "Cast" or product.input[1] not in constants:
            continue
        quantized, scale = (constants.pop(entry) for entry in (cast.input[0], product.input[1]))
        value = numpy_helper.to_array(quantized) * numpy_helper.to_array(scale)
        name = product.output[0]
        constants[name] = numpy_helper.from_array(value.astype(np.float32), name)
        graph.node.remove(cast)
        graph.node.remove(product)
    del graph.initializer[:]
    graph.initializer.extend(constants.values())
    return model


def add_sentence_encoder(graph: GraphWriter, encoder: Any, ids: str) -> str:
    """Adds the encoder and its pooling to a graph; returns the name of the sentences' unit rows.

    encoder: graph of `read_sentence_encoder`.
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
    # a sum suffices: it has the direction of the mean
    total = graph.add("ReduceSum", graph.add("Mul", states, weights), graph.integers(1), keepdims=0)
    return graph.unit_rows(total)


def sentence_tokenizer(context_length: int = CONTEXT_LENGTH) -> Any:
    """Returns BERT's uncased tokenizer, which truncates and pads on the right."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    words = files("mlcd.export.starter").joinpath(_VOCABULARY).read_text(encoding="utf-8")
    vocabulary = {word: token_id for token_id, word in enumerate(words.split("\n")[:-1])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))  # noqa: S106
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special_tokens = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=special_tokens,
    )
    tokenizer.enable_truncation(context_length)
    tokenizer.enable_padding(length=context_length, pad_id=PAD_ID, pad_token="[PAD]")  # noqa: S106
    return tokenizer
