"""The errors that the service adds to those of the core: what is wrong with a request, a key or a job."""

from collections.abc import Mapping

from mlcd.errors import ArtifactInvalid, ImageRejected, InvalidInput, MlcdError, Overloaded


class BadRequest(InvalidInput):
    """The request itself is malformed: body, parameter or encoding."""

    name = "malformed-request"

    def __init__(
        self, message: str, *, remedy: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.param = param


class TooLarge(InvalidInput):
    """A limit of /v1/info is exceeded."""

    name = "too-large"

    def __init__(self, message: str, *, limit: str) -> None:
        super().__init__(message, remedy=f"the limit {limit} is stated in /v1/info")
        self.limit = limit


class TooSlow(InvalidInput):
    """A body comes so slowly that it would hold its place for nothing."""

    name = "request-timeout"

    def __init__(self, message: str) -> None:
        super().__init__(message, remedy="send the request again over a better connection")
        self.headers = {"Connection": "close"}


class Misdirected(InvalidInput):
    """The Host header names a server that this one is not known as."""

    name = "misdirected-request"


class ForeignOrigin(MlcdError):
    """A web page of another origin has its visitor's browser ask a server that knows no keys."""

    name = "forbidden"


class NotAcceptable(InvalidInput):
    """The Accept header asks for what this route cannot give."""

    name = "not-acceptable"


class Unsupported(InvalidInput):
    """The body is of a media type that this route does not take."""

    name = "unsupported-media-type"


class Unauthorized(MlcdError):
    """No key, or none that the server knows as valid; shown: one was sent."""

    name = "unauthorized"

    def __init__(self, message: str, *, remedy: str, shown: bool = False) -> None:
        super().__init__(message, remedy=remedy)
        # RFC 6750: which scheme, and what is wrong with what came.
        self.headers = {
            "WWW-Authenticate": 'Bearer realm="mlcd"' + (', error="invalid_token"' if shown else "")
        }


class Forbidden(MlcdError):
    """The key is valid and its scopes do not reach so far."""

    name = "forbidden"

    def __init__(self, scope: str) -> None:
        super().__init__(f"the API key lacks the scope {scope}", remedy="use one that has it")
        self.headers = {
            "WWW-Authenticate": f'Bearer realm="mlcd", error="insufficient_scope", scope="{scope}"'
        }


class OutsideRoots(MlcdError):
    """A job names a place that jobs may not use; whether there is anything is not told."""

    name = "forbidden"

    def __init__(self, param: str) -> None:
        super().__init__(
            f"the {param} is not in a folder that jobs may use",
            remedy="the server's MLCD_JOBS__ROOTS says which",
        )
        self.param = param


class RecordDamaged(ArtifactInvalid):
    """What is kept of one job is not what was written; the others are sound. Its text names no file."""

    name = "job-damaged"

    def __init__(self) -> None:
        super().__init__(
            "the job queue holds something that is no job", remedy="DELETE of that job removes it"
        )


class RateExceeded(Overloaded):
    """The key has sent as many images as it may for now."""

    name = "too-many-requests"

    def __init__(self, rate: int, *, retry_after_s: int) -> None:
        super().__init__(
            f"the API key is over its rate of {rate} images a minute",
            remedy=f"come back in {retry_after_s} s",
        )
        self.headers = {"Retry-After": str(retry_after_s)}


class StrictBatch(InvalidInput):
    """One image of a batch failed on a route that knows no partial answer."""

    def __init__(self, index: int, rejection: ImageRejected, *, param: str) -> None:
        super().__init__(f"image {index}: {rejection.message}", remedy=rejection.remedy)
        self.index, self.rejection, self.name = index, rejection, rejection.name
        self.param = param

    @classmethod
    def first_of(
        cls, errors: Mapping[int, ImageRejected], *, param: str = "input[{index}]"
    ) -> "StrictBatch":
        """param: the field's name in the client's own words."""
        index = min(errors)
        return cls(index, errors[index], param=param.format(index=index))
