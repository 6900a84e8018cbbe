"""The route of the usage of API keys."""

from datetime import date, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request

from mlcd.service.deadline import within_deadline
from mlcd.service.errors import BadRequest, Forbidden
from mlcd.service.http.access import AppResources
from mlcd.service.http.answers import check_answer_bytes
from mlcd.service.http.auth import needs
from mlcd.service.keys.file import Key
from mlcd.service.keys.usage_stores import KINDS, today
from mlcd.wire.key_usage import DayUsage, UsageList

router = APIRouter(tags=["info"])

_DAYS: Final = 30
_DAY_BYTES: Final = 120  # of a key's day in JSON
_DATE: Final[dict[str, Any]] = {"format": "date"}


@router.get("/v1/usage", dependencies=[needs()], responses={403: {}, 413: {}, 504: {}})
async def usage(
    request: Request,
    resources: AppResources,
    first: Annotated[str | None, Query(alias="from", json_schema_extra=_DATE)] = None,
    last: Annotated[str | None, Query(alias="to", json_schema_extra=_DATE)] = None,
    key: str | None = None,
) -> UsageList:
    """Counts what the API key has used, by day (UTC): by default the last 30 days.

    These are requests with images or texts that were answered; what was refused does not count.
    A key of scope `admin`, or a server without keys, sees all keys, or the one of the id `key`.
    """
    to = today() if last is None else _parse_day(last, "to")
    since = _first_day(to) if first is None else _parse_day(first, "from")
    if since > to:
        raise BadRequest("from must not be later than to", param="from")
    caller: Key | None = request.state.key
    if caller is not None and not caller.grants("admin"):
        if key not in (None, caller.id):
            raise Forbidden("admin")
        key = caller.id
    used = await within_deadline(resources.usage.read(since, to), request.state.deadline)
    places = sorted(place for place in used if key in (None, place[1]))
    check_answer_bytes(
        _DAY_BYTES * len(places), resources.settings.limits, remedy="ask for fewer days"
    )
    return UsageList(
        object="list",
        store=resources.usage.store.kind,
        data=[
            DayUsage(
                date=date.fromisoformat(day),
                key=key_id or None,
                **{kind: used[day, key_id][kind] for kind in KINDS},
            )
            for day, key_id in places
        ],
    )


def _first_day(last: date) -> date:
    return date.fromordinal(max(1, last.toordinal() - _DAYS + 1))


def _parse_day(text: str, param: str) -> date:
    try:
        day = datetime.strptime(text, "%Y-%m-%d").date()  # noqa: DTZ007 - a day has no time zone
    except ValueError:
        day = None
    if day is None or day.isoformat() != text:
        raise BadRequest(f"{param} must be a day, such as 2026-11-28", param=param)
    return day
