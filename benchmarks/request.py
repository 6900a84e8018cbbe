"""The CPU time that a small request costs the service, against another checkout of this repository.

    python benchmarks/request.py demo/model demo/images [--base CHECKOUT] [--rounds 30]
    python benchmarks/request.py demo/model demo/images --processes 2

32 clients each post one picture and wait for the answer. The servers of both checkouts, or of one
and of several processes, run all the time and are asked in turns, so that ratios hold where other
work shares the cores. CPU is user and system time: of the server's own processes, which read,
decode and answer, and of the engines' processes below them. Nothing is cached.
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
    parser.add_argument("--processes", type=int, help="Of this checkout, against one.")
    parser.add_argument("--route", choices=ROUTES, default="embed")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--requests", type=int, default=300, help="In each round.")
    options = parser.parse_args()
    report(measured(options, arms := of_options(options)), arms)


def of_options(options: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Returns the environment of each server, `this` first."""
    arms = {"this": of_tree(HERE)}
    if options.base:
        arms["base"] = of_tree(options.base.resolve())
    if options.processes:
        arms["several"] = {**of_tree(HERE), "MLCD_PROCESSES": str(options.processes)}
    return arms


def measured(options: argparse.Namespace, arms: dict[str, dict[str, str]]) -> Figures:
    figures, sent = Figures(), payloads(options.images, options.route)
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(serving(options.model, {**settings, **NO_CACHE}))
            for name, settings in arms.items()
        }
        for server in servers.values():
            measure(Figures(), "warm-up", server, sent, 4 * options.requests)
        for _ in range(options.rounds):
            for name, server in servers.items():
                measure(figures, name, server, sent, options.requests)
    return figures


def report(figures: Figures, arms: dict[str, dict[str, str]]) -> None:
    for name in arms:
        for what in (*PARTS, "rate"):
            unit = "images/s" if what == "rate" else "ms of CPU a request"
            print(f"{name}, {what:6} {figures.show(f'{name} {what}', unit)}")
    for one, other in (("this", "base"), ("several", "this")):
        for what in (*PARTS, "rate"):
            if {one, other} <= arms.keys():
                print(
                    f"{one} / {other}, {what:6} {figures.ratio(f'{one} {what}', f'{other} {what}')}"
                )


def of_tree(tree: Path) -> dict[str, str]:
    """Returns the environment in which Python takes the code of a checkout, wherever it is run."""
    return {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}


def cpu_s(pid: int) -> dict[str, float]:
    """Returns the CPU seconds of a server, to the nanosecond, and of the engines below it."""
    servers = children(pid)
    engines = [engine for server in servers for engine in children(server)]
    if not engines:  # without a supervisor
        servers, engines = [pid], servers
    return {
        "server": sum(_cpu_clock_s(each) for each in servers),
        "engine": sum(_cpu_clock_s(each) for each in engines),
    }


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
