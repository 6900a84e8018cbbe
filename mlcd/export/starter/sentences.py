"""The starter's sentence encoder: all-MiniLM-L6-v2, whose graph and vocabulary become ours.

The graph comes with weights of 8 bits for each channel, which it multiplies out; activations are
float32, so a text's row does not depend on its neighbors in the batch.
"""

from importlib.resources import files
from typing import Any, Final

import onnx

from mlcd.export.onnx_graph import GraphWriter

CONTEXT_LENGTH: Final = 256  # the longest that sentence-transformers gives this encoder
DIMENSION: Final = 384
PAD_ID: Final = 0
_VOCABULARY: Final = "bert_uncased_vocab.txt"


def add_sentence_encoder(graph: GraphWriter, encoder: Any, ids: str) -> str:
    """Adds the encoder and its pooling to a graph; returns the unit rows of the sentences.

    encoder: the package's graph, from ids, mask and segments to the state of every token.
    """
    seen = graph.add("Not", graph.add("Equal", ids, graph.integers(PAD_ID)))
    mask = graph.add("Cast", seen, to=onnx.TensorProto.INT64)
    segments = graph.add("Mul", ids, graph.integers(0))
    (states,) = graph.include(
        encoder,
        "sentence",
        {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments},
    )
    weights = graph.add(
        "Unsqueeze",
        graph.add("Cast", seen, to=onnx.TensorProto.FLOAT),
        graph.integers(-1),
    )
    # the direction of a sum is that of the mean
    total = graph.add(
        "ReduceSum", graph.add("Mul", states, weights), graph.integers(1), keepdims=0
    )
    return graph.unit_rows(total)


def sentence_tokenizer() -> Any:
    """Returns BERT's uncased tokenizer, which cuts to CONTEXT_LENGTH and pads on the right."""
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
    tokenizer.enable_truncation(CONTEXT_LENGTH)
    tokenizer.enable_padding(length=CONTEXT_LENGTH, pad_id=PAD_ID, pad_token="[PAD]")  # noqa: S106
    return tokenizer
