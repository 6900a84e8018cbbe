"""What a log may say of an error: kind and place, never its text, which may hold what clients sent."""

from typing import Final

_PLACES: Final = 12


def kinds(error: BaseException | None) -> str:
    """Of the error and of its causes, outermost first."""
    found = []
    while error is not None:
        found.append(type(error).__name__)
        error = error.__cause__
    return " from ".join(found)


def places(error: BaseException) -> str:
    """Modules and lines that the error came through, outermost first, with those of its cause."""
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(f"{trace.tb_frame.f_globals.get('__name__', '?')}:{trace.tb_lineno}")
        trace = trace.tb_next
    cause = error.__cause__
    behind = "" if cause is None else f" from {type(cause).__name__} {places(cause)}"
    return " > ".join(found[-_PLACES:]) + behind
