"""The errors of the service, about requests, keys and jobs; `mlcd.errors` has the others."""

from collections.abc import Mapping
from typing import Literal

from mlcd.errors import (
    ArtifactInvalid,
    InvalidInput,
    MlcdError,
    NoTextTower,
    Overloaded,
    Rejection,
    TextRejected,
)


class BadRequest(InvalidInput):
    """The request itself is malformed: body, parameter or encoding."""

    name = "malformed-request"

    def __init__(
        self, message: str, *, remedy: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.param = param


class InvalidField(InvalidInput):
    """A field of a well-formed request is invalid. param: name of the field."""

    def __init__(self, error: InvalidInput, *, param: str) -> None:
        super().__init__(error.message, remedy=error.remedy)
        self.param = param


class TooLarge(InvalidInput):
    """A limit of /v1/info is exceeded."""

    name = "too-large"

    def __init__(self, message: str, *, limit: str) -> None:
        super().__init__(message, remedy=f"the limit {limit} is stated in /v1/info")
        self.limit = limit


class QuotaExceeded(TooLarge):
    """An API key would exceed its number or bytes of files."""

    name = "too-large"

    def __init__(self, quota: str, *, limit: str) -> None:
        super().__init__(f"an API key may have at most {quota}; delete some first", limit=limit)


class StorageFull(MlcdError):
    """A file does not fit on the disk, or into the quota of all files together."""

    name = "insufficient-storage"

    def __init__(self) -> None:
        super().__init__(
            "the server lacks room for this file",
            remedy="delete files, or ask the operator: MLCD_FILES__MAX_BYTES and the disk",
        )


class TooSlow(InvalidInput):
    """A body arrives so slowly that it occupies memory for too long."""

    name = "request-timeout"

    def __init__(self, message: str) -> None:
        super().__init__(message, remedy="send the request again over a better connection")
        self.headers = {"Connection": "close"}


class Misdirected(InvalidInput):
    """The Host header has a name that does not belong to this server."""

    name = "misdirected-request"


class ForeignOrigin(MlcdError):
    """A web page of another origin made a browser send a request to a server without keys."""

    name = "forbidden"


class NotAcceptable(InvalidInput):
    """The Accept header accepts none of the route's media types."""

    name = "not-acceptable"


class Unsupported(InvalidInput):
    """The body has a media type that this route does not accept."""

    name = "unsupported-media-type"


class Unauthorized(MlcdError):
    """The request lacks a valid key. shown: whether it has a key, which is then invalid."""

    name = "unauthorized"

    def __init__(self, message: str, *, remedy: str, shown: bool = False) -> None:
        super().__init__(message, remedy=remedy)
        # By RFC 6750, the header names the scheme and the problem of the key.
        self.headers = {
            "WWW-Authenticate": 'Bearer realm="mlcd"' + (', error="invalid_token"' if shown else "")
        }


class Forbidden(MlcdError):
    """The key is valid but lacks the route's scope."""

    name = "forbidden"

    def __init__(self, scope: str) -> None:
        super().__init__(f"the API key lacks the scope {scope}", remedy="use a key that has it")
        self.headers = {
            "WWW-Authenticate": f'Bearer realm="mlcd", error="insufficient_scope", scope="{scope}"'
        }


Param = Literal["input", "output"]


class OutsideRoots(MlcdError):
    """A job names a path that jobs may not use; the message does not say whether it exists."""

    name = "forbidden"

    def __init__(self, param: Param) -> None:
        super().__init__(
            f"the {param} must be inside a root for jobs",
            remedy="the server's MLCD_JOBS__ROOTS lists the roots",
        )
        self.param = param


class OutsideKey(MlcdError):
    """The key is limited to some collections, and the request would create another."""

    name = "forbidden"

    def __init__(self, param: str) -> None:
        super().__init__(
            "the API key is for other collections", remedy="`mlcd keys list` shows which"
        )
        self.param = param


class RecordDamaged(ArtifactInvalid):
    """The record of one job is damaged; other jobs are intact. The message does not name the
    file.
    """

    name = "job-damaged"

    def __init__(self) -> None:
        super().__init__("the record of this job is damaged", remedy="DELETE of the job removes it")


class TextNotSupported(NoTextTower):
    """A request to a model without a text tower contains a text. param: field of the text."""

    def __init__(self, model: str, *, param: str) -> None:
        super().__init__(model)
        self.param = param


class RateExceeded(Overloaded):
    """The key has reached its rate of images and texts in the last minute."""

    name = "too-many-requests"

    def __init__(self, rate: int, *, retry_after_s: int) -> None:
        super().__init__(
            f"the API key is over its rate of {rate} images per minute",
            remedy=f"retry in {retry_after_s} s",
        )
        self.headers = {"Retry-After": str(retry_after_s)}


class StrictBatch(InvalidInput):
    """An image or text of a batch failed, on a route without partial answers."""

    def __init__(self, index: int, rejection: Rejection, *, param: str) -> None:
        kind = "text" if isinstance(rejection, TextRejected) else "image"
        super().__init__(f"{kind} {index}: {rejection.message}", remedy=rejection.remedy)
        self.index, self.rejection, self.name = index, rejection, rejection.name
        self.param = param

    @classmethod
    def first_of(
        cls, errors: Mapping[int, Rejection], *, param: str = "input[{index}]"
    ) -> "StrictBatch":
        """Returns the error of the first failed item. param: the field's name in the dialect."""
        index = min(errors)
        return cls(index, errors[index], param=param.format(index=index))
