"""The CPU time that a small request costs the service, against another checkout of this repository.

    python benchmarks/request.py demo/model demo/images [--base CHECKOUT] [--rounds 30]

32 clients each post one picture and wait for the answer. The servers of both checkouts run all the
time and are asked in turns, so that ratios hold where other work shares the cores. CPU is user and
system time: of the server's own process, which reads, decodes and answers, and of the engine's
process below it. Nothing is cached.
"""

import argparse
import asyncio
import time
from contextlib import ExitStack
from pathlib import Path

from overload import CLIENTS, NO_CACHE, Server, serving
from serve import Figures, children, payload, send_all

ROUTES = {
    "embed": ("/v1/images/embed", "application/octet-stream"),
    "labels": ("/v1/labels", "application/json"),
}
PARTS = ("server", "engine", "both")
HERE = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("images", type=Path, help="A folder of pictures.")
    parser.add_argument("--base", type=Path, help="A checkout to compare with.")
    parser.add_argument("--route", choices=ROUTES, default="embed")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--requests", type=int, default=300, help="In each round.")
    options = parser.parse_args()
    sent = payloads(options.images, options.route)
    trees = {"this": HERE} | ({"base": options.base.resolve()} if options.base else {})
    figures = Figures()
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(serving(options.model, {**of_tree(tree), **NO_CACHE}))
            for name, tree in trees.items()
        }
        for server in servers.values():
            measure(Figures(), "warm-up", server, sent, 4 * options.requests)
        for _ in range(options.rounds):
            for name, server in servers.items():
                measure(figures, name, server, sent, options.requests)
    for name in trees:
        for what in (*PARTS, "rate"):
            unit = "images/s" if what == "rate" else "ms of CPU a request"
            print(f"{name}, {what:6} {figures.show(f'{name} {what}', unit)}")
    if options.base:
        for what in PARTS:
            print(f"this / base, {what:6} {figures.ratio(f'this {what}', f'base {what}')}")


def of_tree(tree: Path) -> dict[str, str]:
    """Returns the environment in which Python takes the code of a checkout, wherever it is run."""
    return {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}


def cpu_s(pid: int) -> dict[str, float]:
    """Returns the CPU seconds of a server, to the nanosecond, and of the engine below it."""
    engines = sum(_cpu_clock_s(child) for child in children(pid))
    return {"server": _cpu_clock_s(pid), "engine": engines}


def _cpu_clock_s(pid: int) -> float:
    return time.clock_gettime((~pid << 3) | 2)  # the clock's id by clock_getcpuclockid(3)


def payloads(images: Path, route: str) -> list[bytes]:
    path, accept = ROUTES[route]
    files = sorted(file for file in images.rglob("*.*") if file.is_file())[:1000]
    return [payload(path, file.read_bytes(), f"image/{file.suffix[1:]}", accept) for file in files]


def measure(figures: Figures, name: str, server: Server, sent: list[bytes], num: int) -> None:
    before, started = cpu_s(server.process.pid), time.perf_counter()
    asyncio.run(send_all(server.port, sent, num, CLIENTS))
    figures.add(f"{name} rate", num / (time.perf_counter() - started))
    after = cpu_s(server.process.pid)
    spent = {part: 1000 * (after[part] - before[part]) / num for part in before}
    for part, value in {**spent, "both": sum(spent.values())}.items():
        figures.add(f"{name} {part}", value)


if __name__ == "__main__":
    main()
