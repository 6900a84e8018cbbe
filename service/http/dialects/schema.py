"""Fields of which a request gives one: a type of Python cannot say it, a JSON schema can."""

from pydantic import JsonValue


def exactly_one(**types: str | tuple[str, ...]) -> dict[str, JsonValue]:
    """Of these fields one is given and no null. types: JSON's name of each field's type, or names."""
    return {"oneOf": [_given(name, [kind] if isinstance(kind, str) else list(kind)) for name, kind in types.items()]}


def _given(name: str, kinds: list[str]) -> JsonValue:
    return {"required": [name], "properties": {name: {"type": [*kinds]}}}
