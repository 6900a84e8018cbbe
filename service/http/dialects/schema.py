"""Parts of JSON schemas: an example image, and a choice of fields that Python types cannot say."""

from typing import Final

from pydantic import JsonValue

# A PNG of 4 x 4 pixels, black and white in columns.
EXAMPLE_IMAGE: Final = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAQAAAAECAAAAACMmsGiAAAAFElEQVR42mNg+M/wn4mB"
    "gYEBQQAAIi4CBSsxuAQAAAAA"
    "SUVORK5CYII="
)


def exactly_one(**types: str | tuple[str, ...]) -> dict[str, JsonValue]:
    """Returns a schema by which exactly one of these fields is given, and not as null.

    types: each field's JSON type, or several of them.
    """
    return {
        "oneOf": [
            _given(name, [kind] if isinstance(kind, str) else list(kind))
            for name, kind in types.items()
        ]
    }


def _given(name: str, kinds: list[str]) -> JsonValue:
    return {"required": [name], "properties": {name: {"type": [*kinds]}}}
