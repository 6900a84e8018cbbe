"""A search by words over HTTP, against a search by vector plus the tower of texts.

    python benchmarks/search_text.py [--items 100000] [--rounds 5] [--model MODEL]

The model is a CLIP whose text tower has the size of ViT-B/32's (12 layers of width 512, 77 tokens)
with random weights, unless MODEL names an artifact with texts. The collection and its index are
those of `search.py`, with a recall of 0.95. One client sends one query at a time, the two kinds in
turns; every text is another one, so no cache has it. The tower's time is what its engine took for
the batch of that text (Server-Timing). The claim: p50 by text is at most 1.2 times p50 by vector
plus the tower's time.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import numpy as np
from overload import Server
from search import Surface

from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.encoders import open_encoder

NAME: Final = "items"
RECALL: Final = 0.95
QUERIES: Final = 100  # of each kind in a round
ADDED_AT_ONCE: Final = 8192
WORDS: Final = ("a", "photo", "of", "the", "red", "old", "dog", "cat", "two", "on", "street", "sky")
MOST: Final = 1.2


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", help="An artifact with texts; default: random weights.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or write_model(Path(folder))
        dimension = fill(Path(folder) / "state" / "collections" / NAME, model, options.items)
        server = Server(model, {"MLCD_STATE_DIR": str(Path(folder) / "state")})
        try:
            server.wait_ready()
            by_vector, by_text, tower_ms = searched(server.url, dimension, options.rounds)
        finally:
            server.process.terminate()
            server.process.wait()
    ratios = [
        text / (vector + tower)
        for text, vector, tower in zip(by_text, by_vector, tower_ms, strict=True)
    ]
    print(f"{options.items} items, {dimension} dimensions, p50 in ms of each of the rounds")
    for name, taken in (("vector", by_vector), ("tower", tower_ms), ("text", by_text)):
        print(f"  {name:7} {' '.join(f'{ms:7.2f}' for ms in taken)}")
    ratio = statistics.median(ratios)
    print(f"text / (vector + tower): {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"claim, at most {MOST}: {'holds' if ratio <= MOST else 'FAILS'}")
    return 0 if ratio <= MOST else 1


def write_model(folder: Path) -> str:
    """Writes a CLIP of random weights as a model artifact."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors
    from transformers import CLIPConfig, CLIPModel

    from mlcd.export.model_artifact import export_model
    from mlcd.models.configs import clip_preprocessing, write_hf_preprocessing
    from mlcd.progress import Reporter

    theirs = folder / "theirs"
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789.,"]
    tokens = dict.fromkeys(["<unk>", *WORDS, *letters, "<start>", "<end>"])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    start, end = vocabulary["<start>"], vocabulary["<end>"]
    text = {
        "vocab_size": len(vocabulary),
        "bos_token_id": start,
        "eos_token_id": end,
        "pad_token_id": end,
    }
    vision = {"num_hidden_layers": 2}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision)).save_pretrained(theirs)
    (theirs / "preprocessor_config.json").write_text(
        json.dumps(write_hf_preprocessing(clip_preprocessing(224)))
    )
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", start), ("<end>", end)]
    )
    backend.save(str(theirs / "tokenizer.json"))
    (theirs / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<end>"}))
    export_model(str(theirs), folder / "model", name="clip", reporter=Reporter("silent"))
    return str(folder / "model")


def fill(path: Path, model: str, num: int) -> int:
    """Makes the collection and its index, and returns the dimension."""
    images = open_encoder(model)
    fingerprint, dimension = images.fingerprint, images.dimension
    images.close()
    path.parent.mkdir(parents=True)
    surface = Surface(dimension)
    with Collection.create(
        path, fingerprint=fingerprint, dimension=dimension, recall=RECALL, background=False
    ) as collection:
        for start in range(0, num, ADDED_AT_ONCE):
            rows = surface.draw(min(ADDED_AT_ONCE, num - start))
            collection.add([Item(f"{start + n}", row, {}) for n, row in enumerate(rows)])
        collection.reindex()
    return dimension


def searched(url: str, dimension: int, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Returns the p50 of each round in milliseconds: by vector, by text, of the tower alone."""
    surface = Surface(dimension)
    rows: list[list[float]] = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for number in range(rounds + 1):
            each: dict[str, list[float]] = {"embeddings": [], "texts": [], "tower": []}
            vectors = surface.draw(QUERIES)
            for vector, text in zip(vectors, texts(seed=100 + number), strict=True):
                for field, query in (("embeddings", vector.tolist()), ("texts", text)):
                    started = time.perf_counter()
                    answer = client.post(
                        f"/v1/collections/{NAME}/search", json={field: [query], "top": 10}
                    )
                    each[field].append(1000 * (time.perf_counter() - started))
                    answer.raise_for_status()
                each["tower"].append(inference_ms(answer))
            rows.append([statistics.median(taken) for taken in each.values()])
    by_vector, by_text, tower = zip(*rows[1:], strict=True)  # the first round warms up
    return [*by_vector], [*by_text], [*tower]


def inference_ms(answer: httpx.Response) -> float:
    found = re.search(r"inference;dur=([0-9.]+)", answer.headers["server-timing"])
    assert found is not None
    return float(found[1])


def texts(seed: int) -> Iterator[str]:
    random = np.random.default_rng(seed)
    for number in range(QUERIES):
        yield " ".join([*random.choice(WORDS, 8), str(1000 * seed + number)])


if __name__ == "__main__":
    sys.exit(main())
