"""The errors that a user can meet.

MlcdError                 base: a message, and the remedy where there is one
├── InvalidInput          the caller's data cannot be used
│   ├── ImageRejected     one image cannot be used; carries a stable reason
│   ├── TextRejected      one text cannot be used; carries a stable reason
│   └── NoTextTower       the model embeds images only
├── NotFound              a named thing does not exist
├── Conflict              it exists already, for something else, or somebody is at it
├── Unavailable           not now: engine down, starting, out of space
│   ├── Overloaded        the queue is full
│   ├── DiskFull          no space where something is written
│   ├── StoreUnreachable  a store behind a network does not answer
│   ├── TooManyOpenFiles  no descriptor is free
│   └── DeadlineExceeded  the time allowed for the work has passed
├── ArtifactInvalid       a directory is incomplete, damaged or of another kind
├── ConfigInvalid         a recipe, option or setting is wrong
└── Diverged              training reached a loss or gradient that is not finite

Bugs of our own stay `ValueError`, `AssertionError` and the like: the user cannot correct them.
"""

from typing import Literal, TypeAlias

ImageReason = Literal[
    "empty",
    "unreadable",
    "too-many-bytes",
    "too-many-pixels",
    "unsupported-format",
    "undecodable",
    "no-embedding",
    "url-refused",
    "fetch-failed",
    "fetch-late",
]

TextReason = Literal["empty", "not-a-string", "not-unicode", "too-long", "no-embedding"]


class MlcdError(Exception):
    """An error that the user can act on: `message`, then the remedy."""

    # stable, so that programs may compare it; a kind without a name of its own has that of the kind
    # above it
    name: str = "internal-error"

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}: {self.remedy}" if self.remedy else self.message


class InvalidInput(MlcdError):
    """The caller's data cannot be used."""

    name = "cannot-be-processed"


class ImageRejected(InvalidInput):
    """One image cannot be used.

    `reason` is stable and safe to show; the text is free of library messages and payloads.
    """

    def __init__(self, reason: ImageReason, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.reason: ImageReason = reason
        self.name = reason


class TextRejected(InvalidInput):
    """One text cannot be used.

    `reason` is stable and safe to show; the message holds nothing of the text.
    """

    def __init__(self, reason: TextReason, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.reason: TextReason = reason
        self.name = reason


# why one item of a request has no embedding
Rejection: TypeAlias = ImageRejected | TextRejected


class NoTextTower(InvalidInput):
    """The model embeds images only, and a text was given."""

    name = "no-text-tower"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"the model {model} embeds images and no texts",
            remedy="join a text tower to it with `mlcd export MODEL OUT --text FROM`",
        )


class NotFound(MlcdError):
    """A named thing does not exist."""

    name = "not-found"


class Conflict(MlcdError):
    """The thing exists already, was made from something else, or another process is building it."""

    name = "conflict"


class Unavailable(MlcdError):
    """The work is legitimate but cannot be done now."""

    name = "unavailable"


class Overloaded(Unavailable):
    """The queue is full; the caller may try again."""

    name = "too-many-requests"


class DiskFull(Unavailable):
    """The disk that is written to is full."""


class StoreUnreachable(Unavailable):
    """A store behind a network does not answer now."""


class TooManyOpenFiles(Unavailable):
    """The process, or the system, has as many files open as it may."""


class DeadlineExceeded(Unavailable):
    """The time allowed for the work has passed."""

    name = "deadline-exceeded"


class ArtifactInvalid(MlcdError):
    """A directory is not a complete, undamaged artifact of the expected kind."""


class ConfigInvalid(MlcdError):
    """A recipe, an option or a setting is wrong."""


class Diverged(MlcdError):
    """Training reached a loss or gradient that is not finite."""
