"""Reads a recipe (YAML) with `a.b=c` overrides, and builds a configuration from its fields.

Unknown keys are refused with a suggestion.
"""

import difflib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from mlcd.errors import ConfigInvalid
from mlcd.training.section import Section
from mlcd.training.start import SIZES, tower_fields

_STEPS = "schedule.steps (epochs x images / schedule.batch_size)"

# Maps names of keys in other programs, without the section, to our keys.
_OTHER_NAMES = {
    "learning_rate": "optim.lr",
    "max_lr": "optim.lr",
    "base_lr": "optim.lr",
    "epoch": _STEPS,
    "epochs": _STEPS,
    "num_epochs": _STEPS,
    "max_steps": "schedule.steps",
    "iterations": "schedule.steps",
    "batch": "schedule.batch_size",
    "bs": "schedule.batch_size",
    "wd": "optim.weight_decay",
    "warmup": "optim.warmup_steps",
    "grad_clip": "optim.clip_norm",
    "dim": "model.embedding_dim",
    "layers": "model.depth",
    "top": "loss.labels_per_image",
    "amp": "compute.precision",
    "output": "out",
}

_TEXT_SIZES: Final = ("context_length", "width", "depth", "heads", "mlp_width", "activation")

_VERBATIM = (
    "data.images",
    "data.labels",
    "data.centers",
    "data.selection",
    "data.pairs",
    "data.embeddings",
    "model.start",
    "model.like",
    "text.start",
    "text.tokenizer",
    "evaluation.images",
    "out",
)

_Config = TypeVar("_Config", bound=Section)


def read_fields(
    recipe: str, overrides: Sequence[str] = (), *, fallback: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the fields of a configuration; for the arguments see `load_config`."""
    fields_of_recipe = _read_recipe(recipe)
    if recipe in list_recipes():
        fields_of_recipe = _drop_replaced_towers(fields_of_recipe, overrides)
    fields = apply_overrides(fields_of_recipe, overrides, fallback or {})
    tower = fields.get("model")
    if isinstance(tower, dict) and (start := tower.get("start")) is not None:
        sizes = tower_fields(str(start), tower.get("like"), tower)
        fields["model"] = {**tower, **sizes}
    return fields


def _drop_replaced_towers(fields: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the fields without the sizes of those towers for which the overrides set `start`.

    A section without a tower size (`width`) stays, for example if it sets only a resolution.
    """
    overriding = apply_overrides({}, overrides, {})
    remaining = dict(fields)
    for section, sizes in (("model", SIZES), ("text", _TEXT_SIZES)):
        override, tower = overriding.get(section), fields.get(section)
        if not isinstance(override, Mapping) or not isinstance(tower, Mapping):
            continue
        if override.get("start") not in (None, tower.get("start")) and "width" in tower:
            remaining[section] = {name: tower[name] for name in tower if name not in sizes}
    return remaining


def apply_overrides(
    fields: dict[str, Any], overrides: Sequence[str], fallback: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the fields with overrides `a.b=c` applied, then `fallback` as in `load_config`."""
    for override in overrides:
        name, separator, value = override.partition("=")
        if not separator or not name:
            raise ConfigInvalid(
                f"{override!r} is not an override", remedy="write it as section.key=value"
            )
        _assign(fields, name.split("."), _parse_value(name, value), override)
    return _apply_fallback(fields, fallback)


def _apply_fallback(fields: dict[str, Any], fallback: Mapping[str, Any]) -> dict[str, Any]:
    filled = {**fallback, **fields}
    for name, section in fallback.items():
        own = fields.get(name)
        if isinstance(section, Mapping) and isinstance(own, dict) and not own.get("mix"):
            filled[name] = {**section, **own}
    return filled


def _parse_value(name: str, value: str) -> object:
    if name in _VERBATIM:  # a folder may be called 2024, or "photos #1"
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigInvalid(f"{name}={value} cannot be read", remedy="quote it as YAML") from error


def build_config(kind: type[_Config], fields: dict[str, Any]) -> _Config:
    """Builds a configuration from its fields.

    Raises ConfigInvalid naming an unknown key, else all missing keys, else the first wrong value.
    """
    required = (
        name for name, field in kind.model_fields.items() if field.is_required() and name != "out"
    )
    sections: dict[str, Any] = {name: {} for name in required}
    try:
        return kind.model_validate({**sections, **fields})
    except ValidationError as error:
        errors = error.errors()
        # A misspelled key is reported first, because it may be why another key is missing.
        for problem in errors:
            if problem["type"] == "extra_forbidden":
                name = _join_key(problem["loc"])
                raise ConfigInvalid(
                    f"unknown key {name}", remedy=_suggest_key(name, kind)
                ) from error
        if missing := [
            name
            for problem in errors
            if problem["type"] == "missing"
            for name in _list_missing(problem)
        ]:
            verb = "is" if len(missing) == 1 else "are"
            remedy = f"add {' '.join(f'{name}=VALUE' for name in missing)}"
            raise ConfigInvalid(f"{', '.join(missing)} {verb} not set", remedy=remedy) from error
        first_error = errors[0]
        if not first_error["loc"]:  # a validator of several sections raised
            raise ConfigInvalid(first_error["msg"].removeprefix("Value error, ")) from error
        raise ConfigInvalid(
            f"{_join_key(first_error['loc'])}={first_error['input']!r}: "
            f"{first_error['msg'].lower().removeprefix('value error, ')}"
        ) from error


def _join_key(path: Sequence[int | str]) -> str:
    return ".".join(map(str, path))


def _list_missing(problem: Mapping[str, Any]) -> list[str]:
    """Returns the missing keys: those listed in the error's context, otherwise its location."""
    names = problem.get("ctx", {}).get("names")
    return (
        [_join_key(problem["loc"])]
        if names is None
        else [_join_key((*problem["loc"], name)) for name in names]
    )


def _suggest_key(name: str, kind: type[Section]) -> str:
    """Returns the remedy for an unknown key: the most likely known key.

    Candidates are the key for a name from other programs, then a similar last word in any section,
    then a similar full name.
    """
    keys = _list_keys(kind)
    section, _, word = name.rpartition(".")
    if (our_key := _OTHER_NAMES.get(word.lower())) is not None:
        return f"did you mean {our_key}?"
    by_word: dict[str, str] = {}
    # Keys of the same section win.
    for key in sorted(keys, key=lambda key: not key.startswith(f"{section}.")):
        by_word.setdefault(key.rpartition(".")[2], key)
    if close := difflib.get_close_matches(word, by_word, n=1):
        return f"did you mean {by_word[close[0]]}?"
    if close := difflib.get_close_matches(name, keys, n=1, cutoff=0.8):
        return f"did you mean {close[0]}?"
    section_keys = [key for key in keys if section and key.startswith(f"{section}.")]
    return f"known: {', '.join(section_keys or keys)}"


def list_recipes() -> list[str]:
    folder = resources.files("mlcd.training") / "recipes"
    return sorted(
        item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml")
    )


def _read_recipe(recipe: str) -> dict[str, Any]:
    try:
        if recipe in list_recipes():
            text = (resources.files("mlcd.training") / "recipes" / f"{recipe}.yaml").read_text()
        else:
            text = Path(recipe).read_text()
        fields = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(list_recipes())
        raise ConfigInvalid(
            f"no recipe called {recipe}", remedy=f"give a YAML file or one of {names}"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigInvalid(f"{recipe} is not YAML") from error
    if not isinstance(fields, dict):
        raise ConfigInvalid(
            f"{recipe} must be a YAML mapping of sections, got {type(fields).__name__}"
        )
    return fields


def _assign(fields: dict[str, Any], path: list[str], value: object, override: str) -> None:
    for name in path[:-1]:
        fields = fields.setdefault(name, {})
        if not isinstance(fields, dict):
            raise ConfigInvalid(f"{override!r}: {name} is a value, not a section")
    fields[path[-1]] = value


def _list_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    names = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names += _list_keys(field.annotation, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names
