"""Long texts are not read to their end, and have the tokens that they had when they were."""

import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from mlcd.errors import InvalidInput
from mlcd.models.tokenizer import Tokenizer

CONTEXT = 16
ROOT = Path(__file__).parents[3]
PROSE = "\n".join(
    path.read_text() for path in sorted((ROOT / "docs" / "explanation").glob("*.md"))[:8]
)
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]


def trained(family):
    """A tokenizer of the kind that the family has, trained on this project's own pages."""
    options = {"special_tokens": SPECIAL, "show_progress": False}
    match family:
        case "clip":
            backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
            backend.normalizer = normalizers.Sequence(
                [
                    normalizers.NFC(),
                    normalizers.Replace(tokenizers.Regex(r"\s+"), " "),
                    normalizers.Lowercase(),
                ]
            )
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(
                        tokenizers.Regex(r"'s|'t|'re|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"),
                        "removed",
                        invert=True,
                    ),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
            trainer = trainers.BpeTrainer(vocab_size=1500, end_of_word_suffix="</w>", **options)
        case "bert":
            backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
            backend.normalizer = normalizers.BertNormalizer()
            backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            trainer = trainers.WordPieceTrainer(vocab_size=1500, **options)
        case "siglip":
            backend = tokenizers.Tokenizer(models.Unigram())
            backend.normalizer = normalizers.NFKC()
            backend.pre_tokenizer = pre_tokenizers.Metaspace()
            trainer = trainers.UnigramTrainer(vocab_size=1500, unk_token="<unk>", **options)
        case "gemma":
            backend = tokenizers.Tokenizer(
                models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
            )
            backend.normalizer = normalizers.Replace(" ", "▁")
            backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
            trainer = trainers.BpeTrainer(vocab_size=1500, **options)
    backend.train_from_iterator(PROSE.splitlines(), trainer)
    if family == "gemma":
        backend.pre_tokenizer = None  # the whole text is one word, as theirs is
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    backend.enable_padding(length=CONTEXT, pad_id=0, pad_token="<pad>")
    backend.enable_truncation(CONTEXT)
    return backend


BACKENDS = {family: trained(family) for family in ("clip", "bert", "siglip", "gemma")}


def check_same(family, texts):
    backend = BACKENDS[family]
    found = Tokenizer(backend, {}, CONTEXT).tokenize(texts, with_cut=True)
    expected = backend.encode_batch(texts)
    assert found.ids.tolist() == [encoding.ids for encoding in expected]
    assert found.num.tolist() == [sum(encoding.attention_mask) for encoding in expected]
    assert found.cut.tolist() == [bool(encoding.overflowing) for encoding in expected]


pieces = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        [" ", "  ", "\n", "\t ", " \n ", "a" * 120, "!?" * 60, "e\u0301\u0302", "\ufb00", "'s"]
    ),
    st.sampled_from(["日本語" * 20, "\x1c", "\u3000", "x" * 400, "de ", "\u0130", "Σ", " \u0308"]),
    st.integers(0, len(PROSE) - 400).map(lambda start: PROSE[start : start + 300]),
)


@pytest.mark.parametrize("family", BACKENDS)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(pieces, max_size=30).map("".join), min_size=1, max_size=4))
@example([" " * 2000 + "end", "word " * 600, "x" * 5000, "日" * 3000, ""])
@example(["!" * 4000, "a\u0301" * 1500, "\x1c" * 200 + " a" * 400, "ab " + "\x1c " * 1000 + "c"])
def test_the_tokens_are_those_of_the_whole_text(family, texts):
    check_same(family, texts)


@pytest.mark.parametrize("family", BACKENDS)
def test_pages_of_prose_have_the_same_tokens_wherever_they_begin(family):
    generator = random.Random(0)
    starts = [generator.randrange(len(PROSE) - 4000) for _ in range(80)]
    check_same(family, [PROSE[start : start + generator.randrange(4000)] for start in starts])


class Counting:
    """A backend that counts the characters that it reads."""

    def __init__(self, backend):
        self._backend, self.num = backend, 0

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def encode_batch(self, texts):
        self.num += sum(map(len, texts))
        return self._backend.encode_batch(texts)


@pytest.mark.parametrize("family", BACKENDS)
def test_most_of_a_long_text_is_never_read(family):
    backend = Counting(BACKENDS[family])
    Tokenizer(backend, {}, CONTEXT).tokenize([PROSE[:8000]] * 10)
    assert backend.num < 10 * 1100


def test_half_a_surrogate_pair_is_found_wherever_it_stands():
    tokenizer = Tokenizer(BACKENDS["clip"], {}, CONTEXT)
    with pytest.raises(InvalidInput):
        tokenizer(["word " * 1000 + "\ud800"])


def test_a_text_that_is_cut_at_its_beginning_is_read_to_its_end():
    backend = trained("bert")
    backend.enable_truncation(CONTEXT, direction="left")
    tokens = Tokenizer(backend, {}, CONTEXT)(["first " * 1000 + "last words"])
    assert np.array_equal(tokens[0], backend.encode("first " * 1000 + "last words").ids)
