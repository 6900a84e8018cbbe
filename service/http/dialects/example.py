"""The image of the examples in the API document."""

from typing import Final

EXAMPLE_IMAGE: Final = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAQAAAAECAAAAACMmsGiAAAAFElEQVR42mNg+M/wn4mBgYEBQQAAIi4CBSsxuAQAAAAA"
    "SUVORK5CYII="
)
"""A PNG of 4 x 4 pixels, black and white in columns."""
