"""The reasons why an image was not fetched."""

from mlcd.errors import ImageReason, ImageRejected


class FetchRejected(ImageRejected):
    """One image cannot be fetched.

    `detail` says what happened. It describes the network, so it is for the operators of the fetch,
    and not for the clients of a server.
    """

    def __init__(
        self, reason: ImageReason, message: str, *, detail: str, remedy: str | None = None
    ) -> None:
        super().__init__(reason, message, remedy=remedy)
        self.detail = detail


def host_refused(detail: str) -> FetchRejected:
    """Returns the refusal of a host; its message is the same for every cause."""
    return FetchRejected(
        "url-refused",
        "the URL's host is not one that may be fetched from",
        detail=detail,
        remedy="send the image itself as a data-URI",
    )


def fetch_failed(message: str, detail: str) -> FetchRejected:
    """Returns the refusal of an image that its host did not deliver."""
    return FetchRejected("fetch-failed", message, detail=detail)
