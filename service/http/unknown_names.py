"""The errors for unknown names: query parameters and fields of bodies."""

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Final

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from mlcd.service.errors import BadRequest

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
# Names that other services use and whose spelling is not close to ours.
_SYNONYMS: Final = {
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


def is_safe_to_echo(name: str) -> bool:
    """Tells whether an error may repeat a name that a client sent: a short identifier."""
    return _NAME.fullmatch(name) is not None


def unknown_name(
    names: Iterable[str],
    choices: Iterable[str],
    *,
    where: str,
    within: Sequence[int | str] = (),
    elsewhere: Iterable[str] = (),
) -> BadRequest:
    """Returns the error for the alphabetically first of the unknown `names`.

    choices: valid names. where: place of the names, such as "the query string". within: path to the
    object that has the name. elsewhere: query parameters of the route, if the name is in a body.
    """
    name, choices = min(names), list(choices)
    shown_name = name if is_safe_to_echo(name) else None
    if name in elsewhere:
        remedy = f"give it in the query string: ?{name}=…"
    elif (similar := _find_similar(name, choices)) is not None:
        remedy = f"did you mean `{similar}`?"
    else:
        remedy = f"known: {', '.join(f'`{choice}`' for choice in choices) or 'none'}"
    param = None if shown_name is None else ".".join(map(str, [*within, shown_name]))
    subject = "a name" if shown_name is None else f"`{shown_name}`"
    return BadRequest(f"{subject} in {where} is not known here", remedy=remedy, param=param)


def _find_similar(name: str, choices: list[str]) -> str | None:
    close = get_close_matches(name.lower(), choices, n=1)
    synonyms = _SYNONYMS.get(name.lower(), ())
    return next((choice for choice in (*close, *synonyms) if choice in choices), None)


def query_names(route: APIRoute) -> tuple[str, ...]:
    """Returns the query parameters that a route or its dependencies declare."""
    return tuple(_iterate_query_names(route.dependant))


def _iterate_query_names(dependant: Dependant) -> Iterator[str]:
    yield from (parameter.alias for parameter in dependant.query_params)
    for inner in dependant.dependencies:
        yield from _iterate_query_names(inner)


def request_query_names(request: Request) -> tuple[str, ...]:
    """Returns the query parameters that the request's route declares."""
    route = request.scope.get("route")
    return query_names(route) if isinstance(route, APIRoute) else ()


def check_query(request: Request) -> None:
    """Raises BadRequest for a query parameter that the request's route does not declare."""
    if not request.scope["query_string"]:
        return
    names = request_query_names(request)
    if unknown := request.query_params.keys() - {*names}:
        raise unknown_name(unknown, names, where="the query string")
