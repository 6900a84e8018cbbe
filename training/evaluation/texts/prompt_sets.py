"""The prompt templates of a zero-shot classifier: a built-in set, or a file."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mlcd.errors import InvalidInput, NotFound
from mlcd.keys import normalize_class
from mlcd.models.prompts import PLACE, prompt, templates
from mlcd.text_tables import decode_text, split_lines
from mlcd.training.evaluation.texts.clip_prompts import set_prompts

_SETS: Final = ("simple", "clip")
_REMEDY: Final = "give simple, clip, a data set of CLIP such as food101, or a .txt or .json file"


@dataclass(frozen=True)
class Prompts:
    """A named set of templates, each with {} for the class name."""

    name: str
    templates: tuple[str, ...]

    @property
    def sha256(self) -> str:
        return hashlib.sha256("\n".join(self.templates).encode()).hexdigest()


def read_prompts(spec: str) -> Prompts:
    """Returns a built-in set of templates, or those of a file: one per line, or a JSON list.

    Raises NotFound or InvalidInput.
    """
    if spec in _SETS:
        return Prompts(spec, templates(spec))
    if spec in set_prompts():
        return Prompts(spec, set_prompts()[spec].templates)
    path = Path(spec)
    if not path.is_file():
        raise NotFound(f"no prompts called {spec}", remedy=_REMEDY)
    prompts = _read_templates(path)
    for template in prompts:
        try:
            prompt(template, "")
        except InvalidInput as error:
            raise InvalidInput(
                f"{path}: {template!r} is not a template",
                remedy=f"put {PLACE} into it exactly once",
            ) from error
    if not prompts:
        raise InvalidInput(
            f"{path} must contain at least one template", remedy="give one template per line"
        )
    return Prompts(path.name, tuple(prompts))


def _read_templates(path: Path) -> list[str]:
    try:
        text = normalize_class(decode_text(path.read_bytes(), str(path)))
        if path.suffix != ".json":
            return [line for line in split_lines(text) if line.strip()]
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{path} must be UTF-8 text, or a JSON list if it ends in .json",
            remedy='give one template per line, or ["a photo of a {}.", …]',
        ) from error
    if not isinstance(content, list) or not all(isinstance(text, str) for text in content):
        raise InvalidInput(f"{path} must be a list of texts", remedy='give ["a photo of a {}.", …]')
    return content
