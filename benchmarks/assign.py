"""Exact top-8 centers: every arithmetic of ours against faiss on the same data, interleaved.

    python benchmarks/assign.py [--data random families photographs jittered texts] [--rows 2048]
                                [--centers 131072] [--dimension 768] [--features DIR] [--plain-cpu]
    python benchmarks/assign.py --embeddings DIR --centers-of DIR

Five kinds of data: random directions; families of 32 near-duplicate centers; MobileNetV2 features
of photographs (tiny_imagenet_30) with the 4,096 centers that k-means finds among them; these
centers 16 times, with noise; CLIP's vectors of class names, with rows that are such vectors with
noise. The last three need ../shared/data and are left out where it is not. --features: where the
features are kept for the next time.

Contenders take turns. In its turn each waits until the threads of the one before it have stopped,
is called once, and then timed for a tenth of a second or one call: in a job, too, a call follows
another. --idle times the first call after the wait instead.

It prints medians (least to most), effective GF/s (of the products that brute force needs), rows by
the level of the scan that settled them, and with --memory what each contender takes beyond the
data. A sample of rows is audited against float64 brute force: label sets must be identical on every
one of them, or the exit status is 1. --plain-cpu computes as on a CPU with AVX2, without VNNI.
--cpu-seconds counts CPU time, for a machine that others share: `taskset -c 0`. --device takes the
arithmetics of that device alone, and adds the share of the best rate of square matrix products that
was measured there in this process. faiss is left out where it is not installed.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.clustering.arithmetics import MatmulName
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.nearest import CenterScan
from mlcd.cores import available_cores
from mlcd.types import Embeddings, Neighbors, unit_rows

_FAMILY = 32
_SPREAD = 0.02  # deviation of a family's members from its middle, in units of the middle's length
_NOISE = 0.3  # length of the noise that is added to real vectors
_COPIES = 16  # of a real center
_REAL_CENTERS = 4096
_AUDIT_BLOCK = 8192
# Calls at least, and of auto the multiplications after which it has run in compiled loops.
_WARM_UP_CALLS: Final = 3
_WARM_UP: Final = 1_010_000_000_000
_PAUSE: Final = 0.05  # seconds; OpenMP's threads spin for some of them after a call
_TURN: Final = 0.1  # seconds for which a contender is timed
_SHARED: Final = Path(__file__).resolve().parents[2] / "shared" / "data"
_MODEL: Final = "encoders/mobilenet_v2_imagenet/mobilenet_v2_1.0_224.onnx"
_TEXTS: Final = "encoders/clip_text_labels"
_KINDS: Final = ("random", "families", "photographs", "jittered", "texts")
_ON_DEVICE: Final = {"cpu": ("numpy",), "cuda": ("cuda-bf16",)}
# AVX2 for oneDNN, torch, its MKL and both OpenBLAS
_PLAIN_CPU: Final = (
    "ONEDNN_MAX_CPU_ISA=AVX2",
    "ATEN_CPU_CAPABILITY=avx2",
    "MKL_ENABLE_INSTRUCTIONS=AVX2",
    "OPENBLAS_CORETYPE=Zen",
)


def main() -> None:
    options = read_options()
    if options.plain_cpu:
        others = [argument for argument in sys.argv[1:] if argument != "--plain-cpu"]
        command = ["env", *_PLAIN_CPU, sys.executable, __file__, *others]
        sys.exit(subprocess.run(command, check=False).returncode)
    if options.memory_of:
        print(extra_memory(options.memory_of, *read_data(options.data[0], options), options.top))
        return
    passed = [compared(kind, options) for kind in options.data if at_hand(kind)]
    sys.exit(0 if all(passed) else 1)


def compared(kind: str, options: argparse.Namespace) -> bool:
    """Prints the comparison on one kind of data and tells if the audit passed."""
    rows, centers = read_data(kind, options)
    print(f"{kind}: {len(rows)} rows, {len(centers)} centers of {rows.shape[1]}, top {options.top}")
    names: list[str] = [*arithmetics()]
    names += ["faiss.knn"] if find_spec("faiss") is not None else []
    if options.device:
        names = [name for name in names if name in _ON_DEVICE[options.device]]
    if options.only:
        names = [name for name in names if name in options.only.split(",")]
    if not names:
        raise SystemExit(f"none of {options.only or 'ours'} can run here")
    contenders = {name: open_contender(name, rows, centers, options.top) for name in names}
    seconds, answers = timed(contenders, rows, centers, options)
    for name, times in seconds.items():
        theirs = seconds.get("faiss.knn")
        report(kind, name, times, theirs, 2 * len(rows) * centers.size, options)
    if options.device:
        report_shares(seconds, 2 * len(rows) * centers.size, options.device)
    for name, found in answers.items():
        if (counts := found.scan) is None:
            continue
        levels = (
            f"{counts.proven} first pass, {counts.wider} wider, {counts.float32} float32, "
            f"{counts.float64} float64"
        )
        print(f"{name:12} ({counts.products}) rows settled by: {levels}")
    return audit(rows, centers, answers, options.audited)


def timed(
    contenders: dict[str, Callable[[], Neighbors]],
    rows: Embeddings,
    centers: Embeddings,
    options: argparse.Namespace,
) -> tuple[dict[str, list[float]], dict[str, Neighbors]]:
    """Returns the seconds of each run of each contender, in turn, and their answers."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    answers: dict[str, Neighbors] = {}
    clock = time.process_time if options.cpu_seconds else time.perf_counter
    num_calls = 1 - (-_WARM_UP // (len(rows) * centers.size))
    for name, work in contenders.items():
        for _ in range(max(_WARM_UP_CALLS, num_calls if name == "auto" else 0)):
            work()
    for _ in range(options.runs):
        for name, work in contenders.items():
            time.sleep(_PAUSE)
            if not options.idle:
                work()
            started, num_calls = clock(), 0
            while num_calls == 0 or (clock() - started < _TURN and not options.idle):
                answers[name] = work()
                num_calls += 1
            seconds[name].append((clock() - started) / num_calls)
    return seconds, answers


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="*", choices=_KINDS, default=list(_KINDS))
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--centers", type=int, default=131072, help="random and families")
    parser.add_argument("--dimension", type=int, default=768, help="random and families")
    parser.add_argument("--top", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--features", type=Path)
    parser.add_argument("--plain-cpu", action="store_true")
    parser.add_argument("--cpu-seconds", action="store_true")
    parser.add_argument("--idle", action="store_true")
    parser.add_argument("--embeddings", type=Path, help="An artifact; then --centers-of as well.")
    parser.add_argument("--centers-of", type=Path)
    parser.add_argument("--device", choices=list(_ON_DEVICE))
    parser.add_argument("--only", help="Contenders, separated by commas.")
    parser.add_argument("--audited", type=int, default=128)
    parser.add_argument("--memory", action="store_true", help="Takes a process each.")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.embeddings is not None:
        options.data = ["embeddings"]
    return options


def at_hand(kind: str) -> bool:
    if kind in _KINDS[2:] and not _SHARED.is_dir():
        print(f"{kind}: left out, {_SHARED} is not there")
        return False
    return True


def read_data(kind: str, options: argparse.Namespace) -> tuple[Embeddings, Embeddings]:
    if kind == "embeddings":
        artifact = Centers.open(options.centers_of)
        rows = EmbeddingsArtifact.open(options.embeddings).load()
        return artifact.align(rows[: options.rows]), artifact.vectors
    generator = np.random.default_rng(0)
    if kind == "texts":
        names = unit_rows(
            np.concatenate([np.load(path) for path in sorted((_SHARED / _TEXTS).glob("*.npy"))])
        )
        chosen = names[generator.integers(0, len(names), options.rows)]
        return with_noise(chosen, _NOISE, generator), names
    if kind in ("photographs", "jittered"):
        rows, centers = photographs(options)
        if kind == "jittered":
            centers = with_noise(np.repeat(centers, _COPIES, axis=0), _NOISE, generator)
        return rows[generator.permutation(len(rows))[: options.rows]], centers
    shape = (options.centers, options.dimension)
    if kind == "random":
        rows = generator.standard_normal((options.rows, options.dimension), dtype=np.float32)
        return unit_rows(rows), in_blocks(shape, lambda _, noise: unit_rows(noise))
    middles = unit_rows(
        generator.standard_normal((-(-options.centers // _FAMILY), options.dimension))
    )
    spread = np.float32(_SPREAD / options.dimension**0.5)
    centers = in_blocks(
        shape, lambda ids, noise: unit_rows(middles[ids // _FAMILY] + spread * noise)
    )
    near = centers[generator.integers(0, len(centers), options.rows)]
    return with_noise(near, 0.5, generator), centers


def in_blocks(
    shape: tuple[int, int], of: Callable[[NDArray[np.int64], Embeddings], Embeddings]
) -> Embeddings:
    """Returns centers that are made of ids and normal noise, by all cores."""
    centers = np.empty(shape, np.float32)

    def make(start: int) -> None:
        ids = np.arange(start, min(start + _AUDIT_BLOCK, len(centers)))
        random = np.random.default_rng(1 + start)
        centers[ids] = of(ids, random.standard_normal((len(ids), shape[1]), dtype=np.float32))

    with ThreadPoolExecutor(available_cores()) as threads:
        for _ in threads.map(make, range(0, len(centers), _AUDIT_BLOCK)):
            pass
    return centers


def with_noise(rows: Embeddings, length: float, generator: np.random.Generator) -> Embeddings:
    noise = generator.standard_normal(rows.shape, dtype=np.float32)
    return unit_rows(rows + np.float32(length / rows.shape[1] ** 0.5) * noise)


def photographs(options: argparse.Namespace) -> tuple[Embeddings, Embeddings]:
    """Returns the features of photographs, their mean subtracted, and their centers."""
    with tempfile.TemporaryDirectory() as folder:
        kept = options.features or Path(folder) / "features"
        if not kept.exists():
            command = [sys.executable, "-m", "mlcd", "embed", str(_SHARED / "tiny_imagenet_30")]
            command += [str(kept), "--model", str(_SHARED / _MODEL)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = EmbeddingsArtifact.open(kept).load()
    rows = unit_rows(rows - rows.mean(axis=0))
    return rows, kmeans([rows], _REAL_CENTERS, iterations=5).centers


def arithmetics() -> list[MatmulName | Literal["auto"]]:
    names: list[MatmulName | Literal["auto"]] = ["auto", "numpy"]
    if find_spec("torch") is not None:
        from mlcd.clustering.device_scan import cuda_available
        from mlcd.clustering.int8_matmul import computes_int8

        names += ["torch-int8"] if computes_int8() else []
        names += ["cuda-bf16"] if cuda_available() else []
    return names


def open_contender(
    name: str, rows: Embeddings, centers: Embeddings, top: int
) -> Callable[[], Neighbors]:
    """Returns the work, with the centers prepared once for many calls."""
    if name == "faiss.knn":
        import faiss

        inner = faiss.METRIC_INNER_PRODUCT
        return lambda: Neighbors(*faiss.knn(rows, centers, top, metric=inner)[::-1])
    scan = CenterScan(centers, matmul=cast(MatmulName, name))
    return lambda: scan.nearest(rows, top)


def report(
    kind: str,
    name: str,
    times: list[float],
    theirs: list[float] | None,
    flop: int,
    options: argparse.Namespace,
) -> None:
    line = f"{name:12} {statistics.median(times):8.4f} s ({min(times):.4f} to {max(times):.4f})"
    line += f"  {flop / statistics.median(times) / 1e9:6.1f} GF/s"
    if theirs is not None:
        ratio = statistics.median(their / our for our, their in zip(times, theirs, strict=True))
        line += f"  {ratio:.2f} of faiss.knn's speed"
    if options.memory:
        line += f"  {measured_memory(kind, name) / 2**20:6.0f} MiB"
    print(line, flush=True)


def report_shares(seconds: dict[str, list[float]], flop: int, device: str) -> None:
    """Prints which share of the measured limit of the device each arithmetic reaches, proofs and
    re-scoring included.
    """
    import torch

    from mlcd.training.telemetry.throughput import Precision, measure_peak_tflops

    for name, times in seconds.items():
        precision: Precision = "bf16" if name.endswith("bf16") else "fp32"
        limit = measure_peak_tflops(torch.device(device), precision)
        rate = flop / statistics.median(times) / 1e12
        print(
            f"{name:12} {rate:.3g} TFLOP/s, {rate / limit:.1%} of the measured matrix limit of "
            f"{limit:.3g} TFLOP/s in {precision} on {device}"
        )


def measured_memory(kind: str, name: str) -> int:
    data = ["--data", kind] if kind in _KINDS else []
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], *data, "--memory-of", name],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def extra_memory(name: str, rows: Embeddings, centers: Embeddings, top: int) -> int:
    """Returns the growth of the process's peak in bytes, after a warm-up on a few rows."""
    open_contender(name, rows[:8], centers[:512], top)()
    # The peak starts anew, because making the data had a higher one.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    open_contender(name, rows, centers, top)()
    return peak_bytes() - before


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def audit(
    rows: Embeddings, centers: Embeddings, answers: dict[str, Neighbors], num_audited: int
) -> bool:
    """Tells if each of ours has the very ids of float64 brute force on every audited row."""
    chosen = np.random.default_rng(1).permutation(len(rows))[:num_audited]
    wide = rows[chosen].astype(np.float64)
    parts = [
        wide @ centers[at : at + _AUDIT_BLOCK].astype(np.float64).T
        for at in range(0, len(centers), _AUDIT_BLOCK)
    ]
    exact = np.concatenate(parts, axis=1)
    top = next(iter(answers.values())).ids.shape[1]
    expected = np.stack([first_in_order(scores, top) for scores in exact])
    passed = True
    for name, found in answers.items():
        ids = found.ids
        same = float(
            np.mean(
                [
                    set(a) == set(b)
                    for a, b in zip(ids[chosen].tolist(), expected.tolist(), strict=True)
                ]
            )
        )
        print(f"{name:12} identical label sets on {100 * same:.2f} % of {len(chosen)} audited rows")
        passed &= same == 1.0 or name == "faiss.knn"
    return passed


def first_in_order(scores: NDArray[np.float64], top: int) -> NDArray[np.int64]:
    """Returns the ids of the highest scores, of equals the lowest id first."""
    least = np.partition(scores, -top)[-top]
    ids = np.flatnonzero(scores >= least)
    return ids[np.lexsort((ids, -scores[ids]))][:top]


if __name__ == "__main__":
    main()
