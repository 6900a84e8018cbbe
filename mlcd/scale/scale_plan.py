"""The plan as people read it and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Final

from mlcd.scale.machine_rates import Rates
from mlcd.scale.stages import PlannedWork, Stage

_HOUR: Final = 3600.0
_GIB: Final = 2**30
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
            lines.append(f"machines: {self.hours_money:,.2f} in all")
        if self.month_money is not None:
            lines.append(f"storage: {self.month_money:,.2f} a month, without the images")
        return "\n".join(lines)


def _row(stage: Stage) -> tuple[str, ...]:
    sizes = (stage.memory_bytes, stage.storage_bytes, stage.network_bytes)
    return (stage.name, _time(stage.seconds), *map(_size, sizes))


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _size(num_bytes: float) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes / 2**10:,.1f} KiB" if num_bytes else "-"
