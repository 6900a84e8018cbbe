"""One call by the user, split into batches that one model must answer."""

from typing import Generic, TypeVar

from mlcd.client.results import Answer, Origin
from mlcd.errors import Conflict, ImageRejected, Rejection, TextRejected
from mlcd.types import Fingerprint

_Value = TypeVar("_Value")


class Call(Generic[_Value]):
    """The state of one call.

    strict: the first item that fails ends the call. fingerprint: model fingerprint that all answers
    must have; None accepts any.
    """

    def __init__(self, *, strict: bool, fingerprint: Fingerprint | None) -> None:
        self._strict, self._fingerprint = strict, fingerprint
        self._num_items = 0
        self.origin: Origin | None = None

    def items(self, answer: Answer[_Value]) -> list[_Value | Rejection]:
        """Returns the items of the next batch.

        Raises Conflict if another model answered the earlier batches; if strict, raises
        ImageRejected or TextRejected for the first rejected item.
        """
        self._check(answer.origin)
        if self._strict:
            for index, item in enumerate(answer.items, self._num_items):
                if isinstance(item, Rejection):
                    raise _with_index(item, index)
        self._num_items += len(answer.items)
        return answer.items

    def _check(self, origin: Origin | None) -> None:
        if origin is None:
            return
        if self._fingerprint not in (None, origin.fingerprint):
            raise Conflict(
                f"the server answers with the model {origin.fingerprint[:12]} and not with"
                f" {self._fingerprint:.12}",
                remedy="embeddings of different models are not comparable: start the server with"
                " the required model, or embed again",
            )
        if self.origin not in (None, origin):
            raise Conflict(
                "the server's model, centers or precision changed during the call",
                remedy="make the call again",
            )
        self.origin = origin


def _with_index(item: Rejection, index: int) -> Rejection:
    """Returns the rejection with the index of the item in its message."""
    if isinstance(item, TextRejected):
        return TextRejected(item.reason, f"text {index}: {item.message}", remedy=item.remedy)
    return ImageRejected(item.reason, f"image {index}: {item.message}", remedy=item.remedy)
