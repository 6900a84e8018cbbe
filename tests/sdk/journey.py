"""Small models, and what `mlcd embed` gives for some images and texts: run by the project's own
interpreter.

Writes OUT/demo (every artifact), OUT/towers (a model that takes texts) and OUT/samples.json: by
model, paths of three images with their embeddings, and texts with theirs.
"""

import json
import sys
from pathlib import Path

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from tests.conftest import TINY_RECIPE, run_mlcd, write_digits
from tests.two_tower_models import write_two_tower_checkpoint

TEXTS = ("a photo of a cat", "two dogs", "an old red one on the photo")


def main(out: Path) -> None:
    digits, recipe = write_digits(out / "digits", 200), out / "tiny.yaml"
    recipe.write_text(TINY_RECIPE)
    options = ("--features", "hog", "--recipe", recipe, "--no-serve")
    _run("demo", "--images", digits, "--out", out / "demo", *options)
    write_two_tower_checkpoint(out / "checkpoint")
    towers = out / "towers"
    _run("export", out / "checkpoint", towers)
    _run("embed", digits, out / "seen", "--model", towers)
    (out / "texts.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    _run("embed", out / "texts.txt", out / "read", "--model", towers, "--texts")
    samples = {
        "demo": {"images": _images(digits, out / "demo" / "embeddings")},
        "towers": {"images": _images(digits, out / "seen"), "texts": _texts(out / "read")},
    }
    (out / "samples.json").write_text(json.dumps(samples))


def _run(*arguments: object) -> None:
    result = run_mlcd(*arguments)
    assert result.returncode == 0, result.stderr


def _images(folder: Path, embeddings: Path) -> list[dict[str, object]]:
    stored = EmbeddingsArtifact.open(embeddings)
    rows = stored.load()
    return [
        {"image": str(folder / stored.keys[row]), "embedding": rows[row].tolist()}
        for row in (17, 42, 101)
    ]


def _texts(embeddings: Path) -> list[dict[str, object]]:
    rows = EmbeddingsArtifact.open(embeddings).load()
    return [
        {"text": text, "embedding": row.tolist()} for text, row in zip(TEXTS, rows, strict=True)
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
