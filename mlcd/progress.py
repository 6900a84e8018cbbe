"""Reports progress: a bar on a terminal, JSON lines with `--json`, otherwise one final line."""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, Protocol, Self

Style = Literal["auto", "json", "silent"]
_JSON_INTERVAL_S = 1.0


def count_of(num: int, noun: str) -> str:
    """Returns a count in words: `1 file`, `2 files`."""
    return f"{num} {noun}{'' if num == 1 else 's'}"


class Meter(Protocol):
    """The receiver of a pipeline's progress."""

    def advance(self, num: int = 1, **facts: object) -> None:
        """Reports `num` more units as done; any `facts` replace those shown beside the bar."""


class Stages(Protocol):
    """A factory of one meter per stage of the work. An error raised by a meter ends the work."""

    def stage(
        self, name: str, total: int | None, *, done: int = 0
    ) -> AbstractContextManager[Meter]: ...


class Reporter:
    """The `Stages` of the command line."""

    def __init__(self, style: Style = "auto") -> None:
        self._style = style

    @contextmanager
    def stage(self, name: str, total: int | None, *, done: int = 0) -> Iterator[Meter]:
        if self._style == "json":
            meter: _JsonMeter | _SilentMeter | _BarMeter = _JsonMeter(name, total, done)
        elif self._style == "silent" or not sys.stderr.isatty():
            meter = _SilentMeter()
        else:
            meter = _BarMeter(name, total, done)
        with meter:
            yield meter

    def result(self, facts: Mapping[str, object], line: str) -> None:
        """Prints the result on standard output: `line` for people, `facts` with `--json`."""
        if self._style == "json":
            print(json.dumps(facts), flush=True)  # noqa: T201 - this is the command's output
        elif self._style == "auto":
            print(line, flush=True)  # noqa: T201 - this is the command's output


class _SilentMeter:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def advance(self, num: int = 1, **facts: object) -> None: ...


class _JsonMeter:
    def __init__(self, name: str, total: int | None, done: int) -> None:
        self._name, self._total, self._done = name, total, done
        self._facts: dict[str, object] = {}
        self._last = 0.0

    def __enter__(self) -> Self:
        self._emit()
        return self

    def __exit__(self, *_: object) -> None:
        self._emit()

    def advance(self, num: int = 1, **facts: object) -> None:
        self._done += num
        self._facts = facts or self._facts
        if time.monotonic() - self._last >= _JSON_INTERVAL_S:
            self._emit()

    def _emit(self) -> None:
        self._last = time.monotonic()
        event = {"stage": self._name, "done": self._done, "total": self._total, **self._facts}
        print(json.dumps(event), flush=True)  # noqa: T201 - this is the command's output


class _BarMeter:
    def __init__(self, name: str, total: int | None, done: int) -> None:
        # imported here, because servers import this module and draw no bar
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[facts]}"),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(name, total=total, completed=done, facts="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, num: int = 1, **facts: object) -> None:
        self._progress.update(self._task, advance=num)
        if facts:
            shown = " ".join(f"{name}={_short(value)}" for name, value in facts.items())
            self._progress.update(self._task, facts=shown)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
