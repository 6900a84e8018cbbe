"""What all JSON schemas use: fields of which a request gives one, which a type of Python cannot say, and an example."""

from typing import Final

from pydantic import JsonValue

EXAMPLE_IMAGE: Final = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAQAAAAECAAAAACMmsGiAAAAFElEQVR42mNg+M/wn4mBgYEBQQAAIi4CBSsxuAQAAAAA"
    "SUVORK5CYII="
)
"""A PNG of 4 x 4 pixels, black and white in columns."""


def exactly_one(**types: str | tuple[str, ...]) -> dict[str, JsonValue]:
    """Of these fields one is given and no null. types: JSON's name of each field's type, or names."""
    return {
        "oneOf": [
            _given(name, [kind] if isinstance(kind, str) else list(kind))
            for name, kind in types.items()
        ]
    }


def _given(name: str, kinds: list[str]) -> JsonValue:
    return {"required": [name], "properties": {name: {"type": [*kinds]}}}
