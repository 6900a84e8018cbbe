"""The settings of the log, in a separate module, because an engine's process needs no others."""

from typing import Literal

from pydantic import BaseModel


class Log(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The log on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """info: a line for every request, except probes of health and metrics, which are logged at
    debug."""
    format: Literal["auto", "json", "text"] = "auto"
    """auto: text on a terminal, JSON elsewhere."""
