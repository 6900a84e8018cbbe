"""The errors that a user can meet.

MlcdError                 base: a message and, optionally, a remedy
├── InvalidInput          the caller's data cannot be used
│   ├── ImageRejected     one image cannot be used; carries a stable reason
│   ├── TextRejected      one text cannot be used; carries a stable reason
│   └── NoTextTower       the model embeds images only
├── NotFound              a named thing does not exist
├── Conflict              it exists with other content, or another process is using it
├── Unavailable           cannot be done now: engine down, starting, out of space
│   ├── Overloaded        the queue is full
│   ├── DiskFull          the disk to write to is full
│   ├── StoreUnreachable  a remote store does not answer
│   ├── TooManyOpenFiles  no file descriptor is free
│   └── DeadlineExceeded  the time allowed for the work has passed
├── ArtifactInvalid       a directory is incomplete, damaged or of another kind
├── ConfigInvalid         a recipe, option or setting is wrong
└── Diverged              training reached a loss or gradient that is not finite

Bugs in mlcd raise `ValueError`, `AssertionError` and others, because the user cannot fix them.
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

    # stable, so programs may compare it; a class that does not set a name inherits it
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

    `reason` is stable and safe to show; the message contains no library messages or payloads.
    """

    def __init__(self, reason: ImageReason, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.reason: ImageReason = reason
        self.name = reason


class TextRejected(InvalidInput):
    """One text cannot be used.

    `reason` is stable and safe to show; the message does not quote the text.
    """

    def __init__(self, reason: TextReason, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.reason: TextReason = reason
        self.name = reason


# the error of one item of a request
Rejection: TypeAlias = ImageRejected | TextRejected


class NoTextTower(InvalidInput):
    """The model embeds images only, and a text was given."""

    name = "no-text-tower"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"embedding texts needs a text tower, which the model {model} lacks",
            remedy="add one with `mlcd export MODEL OUT --text FROM`",
        )


class NotFound(MlcdError):
    """A named thing does not exist."""

    name = "not-found"


class Conflict(MlcdError):
    """The output exists with other content, or another process is using it."""

    name = "conflict"


class Unavailable(MlcdError):
    """The request is valid but cannot be fulfilled now."""

    name = "unavailable"


class Overloaded(Unavailable):
    """The queue is full; the caller may retry."""

    name = "too-many-requests"


class DiskFull(Unavailable):
    """The disk to write to is full."""


class StoreUnreachable(Unavailable):
    """A remote store does not answer."""


class TooManyOpenFiles(Unavailable):
    """The process or the system has reached its limit of open files."""


class DeadlineExceeded(Unavailable):
    """The time allowed for the work has passed."""

    name = "deadline-exceeded"


class ArtifactInvalid(MlcdError):
    """A directory is not a complete, undamaged artifact of the expected kind."""


class ConfigInvalid(MlcdError):
    """A recipe, an option or a setting is wrong."""


class Diverged(MlcdError):
    """Training reached a loss or gradient that is not finite."""
