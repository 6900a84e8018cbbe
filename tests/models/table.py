"""Writes the table of the models that run here, from exports, in `.venv-models`:
`PYTHONPATH=. .venv-models/bin/python tests/models/table.py`.

The cosine of a row is the lowest of its models, images and texts, with the library's own class.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from mlcd.export.model_artifact import export_model
from mlcd.models.zoo import LoadOptions
from mlcd.progress import Reporter
from tests.models import timm_models, transformers_models

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "bring-weights.md"
_START, _END = "<!-- written by tests/models/table.py -->\n", "<!-- end -->"
_HEAD = "|architecture|library|text tower|cosine|\n|---|---|---|---|\n"


def measure() -> Iterator[tuple[str, str, bool, float]]:
    """Yields title, library, whether there is a text tower, and the lowest cosine."""
    for library, models in (("transformers", transformers_models), ("timm", timm_models)):
        for case in models.CASES.values():
            with TemporaryDirectory() as folder:
                files = Path(folder) / "files"
                models.write_model(case, files)
                artifact = export_model(
                    str(files),
                    Path(folder) / "model",
                    name="m",
                    options=LoadOptions(library=library),
                    reporter=Reporter("silent"),
                )
            facts = artifact.summary
            has_text = "text_parity_min_cosine" in facts
            cosines = [facts[key] for key in facts if key.endswith("parity_min_cosine")]
            yield case.title, library, has_text, min(cosines)


def format_table(rows: list[tuple[str, str, bool, float]]) -> str:
    """Returns the table, one row per architecture with and without texts."""
    merged: dict[tuple[str, bool], list[tuple[str, float]]] = {}
    for title, library, has_text, cosine in rows:
        merged.setdefault((title, has_text), []).append((library, cosine))
    lines = []
    for (title, has_text), models in sorted(merged.items(), key=lambda row: row[0][0].lower()):
        names = ", ".join(library for library, _ in models)
        lowest = min(cosine for _, cosine in models)
        lines.append(f"|{title}|{names}|{'yes' if has_text else ''}|{lowest:.4f}|\n")
    return _HEAD + "".join(lines)


def read_table() -> str:
    """Returns the table of the page."""
    return PAGE.read_text().split(_START)[1].split(_END)[0].strip("\n") + "\n"


def write_table(table: str) -> None:
    before, rest = PAGE.read_text().split(_START)
    PAGE.write_text(f"{before}{_START}\n{table}\n{_END}{rest.split(_END)[1]}")


if __name__ == "__main__":
    write_table(format_table(list(measure())))
    sys.stdout.write(read_table())
