"""A small trained model, and what `mlcd embed` gives for some images: run by the project's own interpreter.

Writes OUT/demo (every artifact) and OUT/samples.json: path of an image and its embedding, three times.
"""

import json
import sys
from pathlib import Path

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from tests.conftest import TINY_RECIPE, run_mlcd, write_digits


def main(out: Path) -> None:
    digits, recipe = write_digits(out / "digits", 200), out / "tiny.yaml"
    recipe.write_text(TINY_RECIPE)
    result = run_mlcd(
        "demo", "--images", digits, "--recipe", recipe, "--out", out / "demo", "--no-serve"
    )
    assert result.returncode == 0, result.stderr
    stored = EmbeddingsArtifact.open(out / "demo" / "embeddings")
    rows = stored.load()
    samples = [
        {"image": str(digits / stored.keys[row]), "embedding": rows[row].tolist()}
        for row in (17, 42, 101)
    ]
    (out / "samples.json").write_text(json.dumps(samples))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
