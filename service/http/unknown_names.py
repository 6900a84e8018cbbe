"""The refusals of names that a route does not know: query parameters and fields of bodies."""

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Final

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from service.errors import BadRequest

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
# What other services call our fields, where the spelling does not tell.
_CALLED_ELSEWHERE: Final = {
    **dict.fromkeys(
        ("k", "n", "limit", "size", "count", "num_results", "max_results", "page_size", "per_page"),
        ("top", "limit", "first"),
    ),
    **dict.fromkeys(("score", "min_score", "min_similarity"), ("threshold", "similarity")),
    **dict.fromkeys(("where", "query_filter"), ("filter",)),
    **dict.fromkeys(("after", "page", "page_token", "starting_after"), ("cursor",)),
    **dict.fromkeys(("file", "image", "data", "upload"), ("files", "images")),
    **dict.fromkeys(("text", "query", "queries", "q"), ("texts",)),
    **dict.fromkeys(("vector", "vectors"), ("embeddings", "embedding")),
}


def is_shown(name: str) -> bool:
    """Tells whether a refusal may repeat a name of the client's: short, and without odd signs."""
    return _NAME.fullmatch(name) is not None


def unknown_name(
    names: Iterable[str],
    known: Iterable[str],
    *,
    where: str,
    within: Sequence[int | str] = (),
    elsewhere: Iterable[str] = (),
) -> BadRequest:
    """Returns the refusal of the first of these names. where: such as "the query string".

    within: the path to the object that the name is of. elsewhere: names that the query string
    knows, where this is about a body.
    """
    name, choices = min(names), list(known)
    shown = name if is_shown(name) else None
    if name in elsewhere:
        remedy = f"give it in the query string: ?{name}=…"
    elif (meant := _meant(name, choices)) is not None:
        remedy = f"did you mean `{meant}`?"
    else:
        remedy = f"known: {', '.join(f'`{choice}`' for choice in choices) or 'none'}"
    param = None if shown is None else ".".join(map(str, [*within, shown]))
    what = "a name" if shown is None else f"`{shown}`"
    return BadRequest(f"{what} in {where} is not known here", remedy=remedy, param=param)


def _meant(name: str, known: list[str]) -> str | None:
    close = get_close_matches(name.lower(), known, n=1)
    called = _CALLED_ELSEWHERE.get(name.lower(), ())
    return next((choice for choice in (*close, *called) if choice in known), None)


def query_names(route: APIRoute) -> tuple[str, ...]:
    """Returns the query parameters that a route declares, itself or by what it depends on."""
    return tuple(_query_names(route.dependant))


def _query_names(dependant: Dependant) -> Iterator[str]:
    yield from (parameter.alias for parameter in dependant.query_params)
    for inner in dependant.dependencies:
        yield from _query_names(inner)


def queried_names(request: Request) -> tuple[str, ...]:
    """Returns the query parameters that the route of a request declares."""
    route = request.scope.get("route")
    return query_names(route) if isinstance(route, APIRoute) else ()


def check_query(request: Request) -> None:
    """Raises BadRequest for a query parameter that the request's route does not declare."""
    if not request.scope["query_string"]:
        return
    known = queried_names(request)
    if unknown := request.query_params.keys() - {*known}:
        raise unknown_name(unknown, known, where="the query string")
