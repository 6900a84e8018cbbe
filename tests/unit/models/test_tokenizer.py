"""Our tokenizers against transformers' and open_clip's on 10,000 strings: many scripts, control
characters, nothing at all, more than the context holds.
"""

import gzip
import importlib
import importlib.metadata
import importlib.util
import json
import random
import re
import shutil
import sys
import types
import unicodedata

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertTokenizer, CLIPTokenizer, PreTrainedTokenizerFast, Siglip2Tokenizer

from mlcd.errors import ArtifactInvalid, ConfigInvalid, InvalidInput
from mlcd.models.tokenizer import Tokenizer

CONTEXT = 20
TEXT = (
    "a photo of the cat dog's they're I'll 3 42 1999 naïve café Ünïcode straße İstanbul ﬁne ﬃ "
    "привет мир κόσμε שלום عربى हिन्दी ไทย 中文 日本語 カタカナ 한국어 e\u0301 q\u0307\u0323 \u1e9b\u0323 "
    "🙂 👩‍👩‍👧‍👦 🇩🇪 ½ ² Ⅷ ① _under_score <b> a.b,c!? {} [MASK] $5.00 http://x.y/z?q=1 C++ #tag @me ... -- ' \" \\ ^`~"
)
WORDS = TEXT.split()
ODD = [
    *(chr(code) for code in range(0x20)), "\x7f", "\x80", "\x85", "\xa0", "\xad", "\u200b", "\u200d",
    "\u2028", "\u2029", "\u202e", "\u3000", "\ufeff", "\ufffd", "\uffff", "\U0010ffff", "  ", "\r\n",
    "<|endoftext|>", "<|startoftext|>", "</s>", "<pad>", "<eos>", "<unk>", "[SEP]", "▁", "</w>",
]  # fmt: skip


def strings(num=10_000):
    generator = random.Random(0)
    assigned = [
        chr(code) for code in range(0x20, 0x30000) if unicodedata.category(chr(code))[0] != "C"
    ]
    made = ["", " ", "\n", "\0", "a " * 500, "x" * 5000, "🙂" * 300, *WORDS, *ODD]
    while len(made) < num:
        parts = generator.choices(WORDS, k=generator.randint(0, 6))
        if generator.random() < 0.4:
            parts += generator.choices(ODD, k=generator.randint(1, 3))
        if generator.random() < 0.4:
            parts.append("".join(generator.choices(assigned, k=generator.randint(1, 8))))
        if generator.random() < 0.1:
            parts *= 20
        generator.shuffle(parts)
        made.append(generator.choice(["", " ", " ", "\t"]).join(parts))
        if generator.random() < 0.2:
            made[-1] = made[-1].upper()
    return made


STRINGS = strings()
CORPUS = [*WORDS * 3, *(text.lower() for text in STRINGS[100:2000])]


def theirs_of(tokenizer, texts=None):
    encoded = tokenizer(
        texts or STRINGS,
        padding="max_length",
        truncation=True,
        max_length=CONTEXT,
        return_tensors="np",
    )
    return encoded["input_ids"]


def assert_same_ids(ours, expected, texts=STRINGS):
    assert ours.dtype == np.int64
    assert ours.shape == expected.shape == (len(texts), CONTEXT)
    for text, ids, theirs in zip(texts, ours.tolist(), expected.tolist(), strict=True):
        assert ids == theirs, repr(text)


def assert_written_back(ours, kind, folder):
    folder.mkdir()
    ours.write(folder)
    texts = STRINGS[:300]
    expected = ours(texts)
    assert_same_ids(Tokenizer.read(folder, CONTEXT)(texts), expected, texts)
    assert_same_ids(expected, theirs_of(kind.from_pretrained(folder), texts), texts)


def openai_merges():
    path = importlib.metadata.distribution("open_clip_torch").locate_file(
        "open_clip/bpe_simple_vocab_16e6.txt.gz"
    )
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = file.read().split("\n")
    return [tuple(line.split()) for line in lines[1 : 49152 - 256 - 2 + 1]]


def openai_vocabulary(merges):
    characters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=byte_order)
    words = [
        *characters,
        *(f"{each}</w>" for each in characters),
        *("".join(pair) for pair in merges),
    ]
    return {
        word: number for number, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])
    }


def byte_order(character):
    """OpenAI's order: printable bytes, then the others, which stand above 255."""
    return (ord(character) > 255, ord(character))


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    merges = openai_merges()
    theirs = CLIPTokenizer(vocab=openai_vocabulary(merges), merges=merges)
    theirs.save_pretrained(folder)
    return folder, theirs


def test_clip_s_vocabulary_gives_transformers_ids(clip, tmp_path):
    folder, theirs = clip
    ours = Tokenizer.read(folder, CONTEXT)
    assert ours(["a photo of a cat"])[0, :8].tolist() == [
        49406,
        320,
        1125,
        539,
        320,
        2368,
        49407,
        49407,
    ]
    assert_same_ids(ours(STRINGS), theirs_of(theirs))
    assert_written_back(ours, CLIPTokenizer, tmp_path / "again")


def test_siglip_2_lowers_the_case_of_gemma_s_vocabulary(tmp_path):
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    special = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<mask>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    )
    trained = json.loads(backend.to_str())["model"]
    theirs = Siglip2Tokenizer(
        vocab=trained["vocab"], merges=[tuple(pair) for pair in trained["merges"]]
    )
    theirs.save_pretrained(tmp_path)
    expected = theirs_of(theirs)
    ours = Tokenizer.read(tmp_path, CONTEXT)
    assert_same_ids(ours(STRINGS), expected)
    assert_written_back(ours, Siglip2Tokenizer, tmp_path / "again")
    # a published file without the lower case, which transformers adds when it opens it
    backend = json.loads((tmp_path / "tokenizer.json").read_text())
    backend["normalizer"] = backend["normalizer"]["normalizers"][-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    assert_same_ids(Tokenizer.read(tmp_path, CONTEXT)(STRINGS), expected)


@pytest.fixture
def canonicalized(monkeypatch):
    """SiglipTokenizer's own treatment of a text; its module asks for sentencepiece, unused here."""
    monkeypatch.setitem(sys.modules, "sentencepiece", types.ModuleType("sentencepiece"))
    name = "transformers.models.siglip.tokenization_siglip"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    settings = types.SimpleNamespace(
        do_lower_case=True,
        remove_punctuation=lambda text: module.SiglipTokenizer.remove_punctuation(None, text),
    )
    return lambda text: module.SiglipTokenizer.canonicalize_text(settings, text)


def test_siglip_removes_case_and_punctuation(tmp_path, canonicalized):
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=900, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(WORDS * 5, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", backend.token_to_id("</s>"))]
    )
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="</s>", unk_token="<unk>")
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "SiglipTokenizer"})
    )
    # the names of special tokens are tokens before a text is cleaned
    texts = [re.sub(r"</s>|<unk>", " ", text) for text in STRINGS]
    expected = theirs_of(theirs, [canonicalized(text) for text in texts])
    assert_same_ids(Tokenizer.read(tmp_path, CONTEXT)(texts), expected, texts)


def test_wordpiece(tmp_path):
    backend = tokenizers.BertWordPieceTokenizer()
    backend.train_from_iterator(CORPUS, vocab_size=900, show_progress=False)
    theirs = BertTokenizer(vocab=backend.get_vocab())
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer.read(tmp_path, CONTEXT)
    assert_same_ids(ours(STRINGS), theirs_of(theirs))
    assert_written_back(ours, BertTokenizer, tmp_path / "again")


def test_no_text_is_no_row(clip):
    assert Tokenizer.read(clip[0], 7)([]).shape == (0, 7)


def test_half_of_a_surrogate_pair_is_refused(clip):
    with pytest.raises(InvalidInput, match="valid Unicode"):
        Tokenizer.read(clip[0], CONTEXT)(["a", "\ud83d"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "lacks tokenizer.json"),
        ("tokenizer.json", "{}", "cannot be read as a tokenizer"),
        ("tokenizer_config.json", None, "cannot be read as JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", "{}", "must name the padding token"),
        ("tokenizer_config.json", '{"pad_token": "<none>"}', "lacks the token <none>"),
        (
            "tokenizer_config.json",
            '{"pad_token": "!", "padding_side": "up"}',
            "padding_side must be .* got 'up'",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_refused(clip, tmp_path, name, content, message):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(clip[0] / file, tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ArtifactInvalid, match=message):
        Tokenizer.read(tmp_path, CONTEXT)


@pytest.mark.parametrize("pad_token", [{"content": "!"}, None])
def test_the_padding_of_old_files_is_found(clip, tmp_path, pad_token):
    shutil.copy(clip[0] / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"pad_token": pad_token, "padding_side": "left"})
    )
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "!"}')
    assert Tokenizer.read(tmp_path, 5)(["cat"]).tolist() == [[0, 0, 49406, 2368, 49407]]


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.delitem(sys.modules, "mlcd.models.tokenizer")
    with pytest.raises(ConfigInvalid, match=r"pip install .*\[text\]"):
        importlib.import_module("mlcd.models.tokenizer")
