"""Writes docs/reference/settings.md from the settings themselves: `python docs/settings.py`."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from service.settings import Settings, as_text, named_fields, nested_model

PAGE: Final = Path(__file__).parent / "reference" / "settings.md"
_HEAD: Final = """# Settings

Environment variables of `mlcd serve`; command-line options win. An unknown `MLCD_` name is refused with a suggestion.
`mlcd serve --print-config` prints every setting as it would be used, one `NAME=value` a line, secrets masked;
`mlcd serve --config FILE` reads such lines, and the environment wins over them. This page is made from the settings
by `python docs/settings.py`.

More on [models](../how-to/bring-weights.md), [engines](../explanation/engines.md),
[decoding](decoding.md#decode-modes), [approximate labels](rest.md#labels),
[load tests](../explanation/pipeline.md#load-tests), [the engine's
process](../explanation/pipeline.md#the-engines-process) and [keys](../how-to/keys.md).
"""


def page() -> str:
    """All of it, in the order of the class; settings that belong together under a heading of their own."""
    sections = [_HEAD]
    for group, fields in itertools.groupby(named_fields(), lambda named: named[1][:-1]):
        heading = []
        if group:
            model = nested_model(Settings.model_fields[group[0]])
            assert model is not None
            assert model.__doc__ is not None
            heading = [f"## {model.__name__}", "", model.__doc__.strip(), ""]
        sections.append("\n".join([*heading, *_table(fields)]))
    return "\n".join(sections)


def _table(fields: Any) -> Iterator[str]:
    yield "| name | meaning | default |"
    yield "|---|---|---|"
    for name, _, field in fields:
        yield f"| `{name}` | {_meaning(field)} | {_default(field)} |"
    yield ""


def _meaning(field: FieldInfo) -> str:
    described = " ".join((field.description or "").split()).removesuffix(".")
    choices = _choices(field.annotation)
    named = f"`{'`, `'.join(choices)}`" if choices else ""
    return ": ".join(part for part in (named, described) if part).replace("|", "\\|").replace("*", "\\*")


def _choices(annotation: Any) -> list[str]:
    """Of a Literal, in a union too."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "none" if field.default in (None, ()) else f"`{as_text(field.default)}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
