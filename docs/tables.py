"""Writes the reference pages of settings and recipes from their classes.

python docs/tables.py
"""

import itertools
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mlcd.service.settings import Settings, as_text, group_model, list_fields
from mlcd.training.config import RunConfig
from mlcd.training.data.data_config import MixedSource, ReadingConfig
from mlcd.training.pairs.pairs_config import PairsConfig

_REFERENCE: Final = Path(__file__).parent / "reference"
_SETTINGS_HEAD: Final = """# Settings

Environment variables of `mlcd serve`; command-line options win. An unknown `MLCD_` name is refused
with a suggestion. `mlcd serve --print-config` prints the effective settings, one `NAME=value` a
line, secrets masked; `mlcd serve --config FILE` reads such lines, and the environment wins over
them. `python docs/tables.py` generates this page.

More on [models](../how-to/bring-weights.md), [engines](../explanation/engines.md),
[decoding](decoding.md#decode-modes), [approximate labels](rest.md#labels), [load
tests](../explanation/pipeline.md#load-tests), [the engine's
process](../explanation/pipeline.md#the-engines-process) and [keys](../how-to/keys.md).
"""

_RECIPES_HEAD: Final = """# Recipes

The keys of a recipe, the YAML file that [`mlcd train`](../how-to/train.md) takes; `a.b=c` after it
sets one. An unknown key is refused with a suggestion. The built-in recipes are in
`training/recipes/`. `python docs/tables.py` generates this page
from the classes in `training/config.py`.

A recipe of your own needs the keys that are *required* here, and data: `data.images` and
`data.labels`, or `data.mix`. One for [images with captions](../how-to/train-on-captions.md) needs
`data.pairs` and `loss.kind`; the last sections replace those of data and loss, except the keys on
reading images.
"""


def settings_page() -> str:
    """Returns the page of all settings, in the order of the class.

    Settings that belong together have a heading of their own.
    """
    sections = [_SETTINGS_HEAD]
    for group, fields in itertools.groupby(list_fields(), lambda named: named[1][:-1]):
        heading = []
        if group:
            model = group_model(Settings.model_fields[group[0]])
            assert model is not None
            assert model.__doc__ is not None
            heading = [f"## {group[0].capitalize()}", "", model.__doc__.strip(), ""]
        sections.append("\n".join([*heading, *_table(fields)]))
    return "\n".join(sections)


def recipes_page() -> str:
    """Returns the page of all keys: those of the top level first, then sections in the class's
    order.
    """
    plain = {
        name: field for name, field in RunConfig.model_fields.items() if group_model(field) is None
    }
    sections = [
        _RECIPES_HEAD,
        "\n".join(_table((name, (), field) for name, field in plain.items())),
    ]
    for name, field in RunConfig.model_fields.items():
        if (model := group_model(field)) is not None:
            sections.append(_section(name, f"{name}.", model))
    sections.append(_section("data.mix", "", MixedSource))
    for name in ("data", "text", "loss"):
        model = group_model(PairsConfig.model_fields[name])
        assert model is not None
        sections.append(
            _section(f"{name}, on pairs", f"{name}.", model, known=ReadingConfig.model_fields)
        )
    return "\n".join(sections)


def _section(title: str, prefix: str, model: type[BaseModel], known: Collection[str] = ()) -> str:
    """Returns a section with a row for each field of the model that is not known already."""
    assert model.__doc__ is not None
    rows = (
        (prefix + name, (), field)
        for name, field in model.model_fields.items()
        if name not in known
    )
    return "\n".join([f"## {title}", "", model.__doc__.strip(), "", *_table(rows)])


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
    return (
        ": ".join(part for part in (named, described) if part)
        .replace("|", "\\|")
        .replace("*", "\\*")
    )


def _choices(annotation: Any) -> list[str]:
    """Yields the values of a Literal, also within a union."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "none" if field.default in (None, ()) else f"`{as_text(field.default)}`"


PAGES: Final = {
    _REFERENCE / "settings.md": settings_page,
    _REFERENCE / "recipes.md": recipes_page,
}

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")
