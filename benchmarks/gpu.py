"""One command for a machine with a GPU: its tests and its benchmarks, in slices of minutes.

python benchmarks/gpu.py              all slices; a table, and results/gpu-NAME.json beside this
python benchmarks/gpu.py --only NAME  one of them
python benchmarks/gpu.py --list       their commands
python benchmarks/gpu.py --out DIR    writes the results there
python benchmarks/gpu.py --wheels DIR checks that the wheels in DIR are small enough to carry

The slices whose targets have no figure come first. Each is a process of its own with a time limit,
so that one that hangs costs its slice alone. A result states hardware, versions and commit; a slice
that fails has one, too.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

ROOT: Final = Path(__file__).resolve().parents[1]
LIMIT_S: Final = 240
# What may travel beside the files of this repository, 24 MiB, and a pack of the study.
MAX_WHEEL_BYTES: Final = 8 * 2**20
RESULTS: Final = Path(__file__).parent / "results"
_TRAIN: Final = "benchmarks/train.py"
_LEFT_OUT: Final = "left out"  # in the line of a benchmark about what it did not measure
_IN_PART: Final = "in part"
_OUT: Final = "OUT"  # in a slice's arguments: the folder of results
# as a decorator, or as one of the marks of a file or of a parameter
_GPU_TEST: Final = re.compile(r"\bmark\.gpu\b")
_SAID: Final = {"0": "passed", _IN_PART: _IN_PART, _LEFT_OUT: _LEFT_OUT}


@dataclass(frozen=True)
class Slice:
    """A command, and the seconds after which it is stopped."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float = LIMIT_S

    def command(self, out: Path) -> list[str]:
        given = (each.replace(_OUT, str(out.resolve()), 1) for each in self.arguments)
        return [sys.executable, *given]


def gpu_tests() -> tuple[str, ...]:
    """Returns the files that hold tests for a GPU. What the others import may be absent there."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return tuple(
        path.relative_to(ROOT).as_posix() for path in found if _GPU_TEST.search(path.read_text())
    )


def _train(tower: str, batch: int, classes: int) -> tuple[str, ...]:
    sizes = ("--batch", str(batch), "--classes", str(classes))
    # a process that decodes takes seconds to start: there are as many as the tower keeps busy
    return (_TRAIN, "--device", "cuda", "--tower", tower, *sizes, "--runs", "2", "--workers", "8")


def _encode(tower: str) -> tuple[str, ...]:
    return ("benchmarks/encode_device.py", "--device", "cuda", "--tower", tower, "--runs", "5")


SLICES: Final[Sequence[Slice]] = (
    Slice("tests", ("-m", "pytest", "-q", "-n0", "-m", "gpu", *gpu_tests())),
    # fewer than 4,096 clusters would not be worth a timing of the GPU's arithmetic to k-means
    Slice(
        "kmeans",
        (
            *("benchmarks/kmeans.py", "--rows", "200000", "--clusters", "16384"),
            *("--dimension", "768", "--runs", "2", "--only", "mlcd"),
        ),
    ),
    Slice("labels-service", ("benchmarks/labels_service.py", "--device", "cuda", "--runs", "3")),
    Slice("train-b32", (*_train("b32", 1024, 1_000_000), "--curve-steps", "200")),
    Slice("faiss-search", ("benchmarks/search.py", "--device", "cuda", "--items", "500000")),
    Slice("encode-b32", _encode("b32")),
    Slice(
        "graph-search",
        ("benchmarks/search.py", "--device", "cuda", "--items", "4000000", "--no-cells"),
    ),
    Slice(
        "head",
        ("benchmarks/head.py", "--device", "cuda", "--classes", "1000000", "--batch", "4096"),
    ),
    # With 256 images the activations take 66 GiB by the plan, and three forms hold their state.
    Slice("train-l14", _train("l14", 64, 1_000_000)),
    Slice(
        "study",
        ("-m", "benchmarks.study", "--device", "cuda", "--rows", f"{_OUT}/study.jsonl"),
        limit_s=520,  # it ends by itself after 8 minutes
    ),
    Slice(
        "assign",
        (
            *("benchmarks/assign.py", "--data", "random", "families", "--centers", "1000000"),
            *("--only", "auto,cuda-bf16,faiss.knn"),
        ),
    ),
    Slice("encode-l14", _encode("l14")),
    Slice(
        "top8-1m",
        (
            *("benchmarks/assign.py", "--device", "cuda", "--data", "random", "families"),
            *("--centers", "1000000", "--rows", "65536", "--runs", "5", "--audited", "64"),
        ),
    ),
)


def run(piece: Slice, out: Path = RESULTS) -> dict[str, Any]:
    """Runs a slice, and returns its result with its last lines, and the figures in its lines of
    JSON.

    out: folder for what it writes beside. At its limit it ends with all processes that it started,
    which would take the next one's time.
    """
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        process = subprocess.Popen(
            piece.command(out),
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ROOT,
        )
        try:
            status = str(process.wait(piece.limit_s))
        except subprocess.TimeoutExpired:
            status = "time limit"
        finally:
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        output = printed.read()
    lines = output.splitlines()
    figures = {}
    for line in lines:
        if line.startswith("{"):
            with suppress(ValueError):  # a dump of something else
                figures |= json.loads(line)
    if status == "0" and any(_LEFT_OUT in line for line in lines):
        status = _LEFT_OUT if _last_of(lines).startswith(_LEFT_OUT) else _IN_PART
    return {
        "name": piece.name,
        "command": ["python", *piece.arguments],
        "status": status,
        "seconds": round(time.perf_counter() - began, 1),
        "output": [line for line in lines if not line.startswith("{")][-60:],
        "figures": figures,
        **origin(),
    }


def _last_of(lines: Sequence[str]) -> str:
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def origin() -> dict[str, Any]:
    """Returns where a result is from."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {
        "device": device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": commit.stdout.strip() or "unknown",
    }


def write(result: Mapping[str, Any], folder: Path) -> Path:
    path = folder / f"gpu-{result['name']}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns the results as the table of a page."""
    rows = ["| slice | device | status | seconds | last line |", "|---|---|---|---|---|"]
    for each in results:
        last = _last_of(each["output"]).replace("|", "/")
        status = _SAID.get(each["status"], f"failed ({each['status']})")
        cells = (each["name"], each["device"], status, each["seconds"], last)
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def check_wheels(folder: Path) -> str:
    """Returns the wheels and their size. Raises SystemExit if they are too large to carry."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("*.whl"))}
    total = sum(sizes.values())
    lines = [f"{size / 2**20:7.1f} MiB  {name}" for name, size in sizes.items()]
    lines.append(f"{total / 2**20:7.1f} MiB  of at most {MAX_WHEEL_BYTES / 2**20:.0f}")
    if not sizes or total > MAX_WHEEL_BYTES:
        raise SystemExit("\n".join([*lines, "these are too large, or there are none"]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=[piece.name for piece in SLICES], action="append")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.wheels is not None:
        print(check_wheels(options.wheels))
        return
    chosen = [piece for piece in SLICES if not options.only or piece.name in options.only]
    if options.list:
        print("\n".join(f"{piece.name:10} {' '.join(piece.arguments)}" for piece in chosen))
        return
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU: run this where there is one")
    options.out.mkdir(exist_ok=True)
    results = []
    for piece in chosen:
        results.append(run(piece, options.out))
        print(f"{piece.name}: {write(results[-1], options.out)}", flush=True)
    print(table(results))
    raise SystemExit(any(each["status"] not in _SAID for each in results))


if __name__ == "__main__":
    main()
