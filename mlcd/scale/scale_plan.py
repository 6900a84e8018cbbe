"""The plan as people read it and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Final

from mlcd.scale.machine_rates import Rates
from mlcd.scale.stages import PlannedWork, Stage

_HOUR: Final = 3600.0
_GIB: Final = 2**30
_YEAR: Final = 365.25 * 24 * _HOUR
_LONG: Final = 10 * _YEAR  # what takes longer is not planned by the second
_HEAD: Final = ("stage", "time", "memory each", "storage", "network")


@dataclass(frozen=True)
class ScalePlan:
    """The stages of some work at some rates. sources: the origin of each rate that matters."""

    work: PlannedWork
    rates: Rates
    stages: Sequence[Stage]
    sources: dict[str, str]

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def storage_bytes(self) -> float:
        return sum(stage.storage_bytes for stage in self.stages)

    @property
    def hours_money(self) -> float | None:
        """Returns the price of all machines for all stages, one after the other."""
        price = self.rates.hour_price
        return None if price is None else price * self.work.machines * self.seconds / _HOUR

    @property
    def month_money(self) -> float | None:
        """Returns the price of a month of what is stored; the images are not in it."""
        price = self.rates.month_price
        return None if price is None else price * self.storage_bytes / _GIB

    def facts(self) -> dict[str, Any]:
        """Returns the plan as JSON fields."""
        return {
            "work": asdict(self.work),
            "rates": asdict(self.rates),
            "sources": self.sources,
            "stages": [asdict(stage) for stage in self.stages],
            "seconds": self.seconds,
            "storage_bytes": self.storage_bytes,
            "price": self.hours_money,
            "price_of_month": self.month_money,
        }

    def __str__(self) -> str:
        rows = [_HEAD, *map(_row, self.stages)]
        rows.append(("all", _time(self.seconds), "", _size(self.storage_bytes), ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        lines += ["", *(f"{stage.name}: {stage.formula}" for stage in self.stages)]
        lines += ["", *(f"{name}: {source}" for name, source in self.sources.items())]
        if self.hours_money is not None:
            hours = f"{self.rates.hour_price:g} x {self.work.machines} machines"
            hours += f" x {self.seconds / _HOUR:,.2f} hours"
            lines.append(f"machines: {hours} = {self.hours_money:,.2f} in all")
        if self.month_money is not None:
            stored = f"{self.rates.month_price:g} x {self.storage_bytes / _GIB:,.2f} GiB"
            lines.append(f"storage: {stored} = {self.month_money:,.2f} a month, without the images")
        return "\n".join(lines)


def _row(stage: Stage) -> tuple[str, ...]:
    sizes = (stage.memory_bytes, stage.storage_bytes, stage.network_bytes)
    return (stage.name, _time(stage.seconds), *map(_size, sizes))


def _time(seconds: float) -> str:
    if seconds > _LONG:
        return f"{seconds / _YEAR:,.0f} years"
    return str(timedelta(seconds=round(seconds)))


def _size(num_bytes: float) -> str:
    for unit, size in (
        ("EiB", 2**60),
        ("PiB", 2**50),
        ("TiB", 2**40),
        ("GiB", 2**30),
        ("MiB", 2**20),
    ):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes / 2**10:,.1f} KiB" if num_bytes else "-"
