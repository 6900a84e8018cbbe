"""The time and the CPU until a server is ready, against another checkout of this repository.

    python benchmarks/start.py demo/model [--base CHECKOUT] [--rounds 5]

Each round starts `mlcd serve` of both checkouts, one after the other, and ends it once
/health/ready says yes. CPU is user and system time of the server and of its engine; where other
work shares the cores, it is what tells. The first start of each does not count: it writes what
later ones find in caches.
"""

import argparse
import time
from pathlib import Path

from overload import serving
from request import HERE, cpu_s, of_tree
from serve import Figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--base", type=Path, help="A checkout to compare with.")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    trees = {"this": HERE} | ({"base": options.base.resolve()} if options.base else {})
    figures = Figures()
    for number in range(options.rounds + 1):
        for name, tree in trees.items():
            measure(figures if number else Figures(), name, options.model, tree)
    for name in trees:
        print(f"{name}, ready after {figures.show(f'{name} s', 's')}")
        print(f"{name}, server      {figures.show(f'{name} server', 's of CPU')}")
        print(f"{name}, engine      {figures.show(f'{name} engine', 's of CPU')}")
    if options.base:
        for what in ("s", "server", "engine"):
            print(f"this / base, {what:6} {figures.ratio(f'this {what}', f'base {what}')}")


def measure(figures: Figures, name: str, model: str, tree: Path) -> None:
    started = time.perf_counter()
    # an empty value: bytecode is written, as where users start it
    with serving(model, {**of_tree(tree), "PYTHONDONTWRITEBYTECODE": ""}) as server:
        figures.add(f"{name} s", time.perf_counter() - started)
        for part, seconds in cpu_s(server.process.pid).items():
            figures.add(f"{name} {part}", seconds)


if __name__ == "__main__":
    main()
