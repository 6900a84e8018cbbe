"""One call by the user: all its batches have one origin, and its items are numbered throughout."""

from typing import Generic, TypeVar

from mlcd.client.results import Answer, Origin
from mlcd.errors import Conflict, ImageRejected, Rejection, TextRejected
from mlcd.types import Fingerprint

_Value = TypeVar("_Value")


class Call(Generic[_Value]):
    """The state of one call.

    strict: the first item that fails ends the call. fingerprint: the only one that answers may
    have; None: any.
    """

    def __init__(self, *, strict: bool, fingerprint: Fingerprint | None) -> None:
        self._strict, self._fingerprint = strict, fingerprint
        self._num = 0
        self.origin: Origin | None = None

    def items(self, answer: Answer[_Value]) -> list[_Value | Rejection]:
        """Returns the items of the next batch.

        Raises Conflict where another model answered it than the batches before, ImageRejected or
        TextRejected where strict.
        """
        self._check(answer.origin)
        if self._strict:
            for place, item in enumerate(answer.items, self._num):
                if isinstance(item, Rejection):
                    raise _with_place(item, place)
        self._num += len(answer.items)
        return answer.items

    def _check(self, origin: Origin | None) -> None:
        if origin is None:
            return
        if self._fingerprint not in (None, origin.fingerprint):
            raise Conflict(
                f"the server answers with the model {origin.fingerprint[:12]} and not with"
                f" {self._fingerprint:.12}",
                remedy="embeddings of two models do not compare: start the server with the other,"
                " or embed again",
            )
        if self.origin not in (None, origin):
            raise Conflict(
                "the server's model, centers or precision changed during the call",
                remedy="make the call again",
            )
        self.origin = origin


def _with_place(item: Rejection, place: int) -> Rejection:
    """Returns the rejection with the item's place in the series."""
    if isinstance(item, TextRejected):
        return TextRejected(item.reason, f"text {place}: {item.message}", remedy=item.remedy)
    return ImageRejected(item.reason, f"image {place}: {item.message}", remedy=item.remedy)
