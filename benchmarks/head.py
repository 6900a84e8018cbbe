"""One forward and backward pass of the class-sharded head against other losses over k classes.

    python benchmarks/head.py [--classes 10000 100000] [--batch 1024] [--dimension 512]
                              [--ratio 0.1] [--runs 5] [--device cpu|cuda]

The forms are interleaved in one run, each in a process of its own for its peak memory:

  ours          mlcd.training.head.partial_fc, negatives in chunks, recomputed in the backward pass
  ours-tf32     the same with products of inputs of 11 significant bits, on a GPU only
  ours-bf16     the same with products of inputs of 8, on a GPU only
  materialized  the same sampled loss with one [B, |S|] product under autograd
  per_column    the authors' later form: one sampled softmax per label column, materialized
  dense         a softmax over all k classes under autograd

Activation memory is the peak of one pass above weights, embeddings and labels, less the gradient of
the rows that the form touches. The forms without a name of a type multiply in float32. A form whose
process ends, as one that needs more memory than there is, is left out of the table.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from mlcd.losses.discrimination import cd_loss, mlcd_loss
from mlcd.losses.margins import with_margin
from mlcd.losses.negatives import draw_negatives
from mlcd.training.head.partial_fc import HeadConfig, PartialFC
from mlcd.training.parallel.compute_config import Products

FORMS = ("ours", "ours-tf32", "ours-bf16", "materialized", "per_column", "dense")
SHORTENED: dict[str, Products] = {"ours-tf32": "tf32", "ours-bf16": "bf16"}
SCALE, LABELS = 64.0, 8
MIB = 2**20


def passes(
    form: str, options: argparse.Namespace
) -> tuple[Callable[[int], int], Callable[[], None]]:
    """Returns one pass, which returns the bytes of the centers' gradient, and a drop of the
    gradients.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn((options.batch, options.dimension), generator=generator)
    embeddings = drawn.to(options.device).requires_grad_()
    labels = torch.randint(0, options.num_classes, (options.batch, LABELS), generator=generator)
    labels = labels.to(options.device)
    config = HeadConfig(negative_ratio=options.ratio, products=SHORTENED.get(form, "fp32"))
    head = PartialFC(options.num_classes, options.dimension, config)
    head.initialize(0)
    head.to(options.device)

    def drop() -> None:
        embeddings.grad = head.weight.grad = None

    def run(step: int) -> int:
        drop()
        if form.startswith("ours"):
            loss = head(embeddings, labels, step).loss
        else:
            loss = {"materialized": _materialized, "per_column": _per_column, "dense": _dense}[
                form
            ](embeddings, head.weight, labels, options.ratio, step)
        loss.backward()
        gradient = head.weight.grad
        assert gradient is not None
        values = gradient._values() if gradient.is_sparse else gradient  # noqa: SLF001
        return values.numel() * values.element_size()

    return run, drop


def _unit(rows: Tensor) -> Tensor:
    return functional.normalize(rows, dim=1)


def _rows(weight: Tensor, ids: Tensor) -> Tensor:
    """Returns rows with a sparse gradient, as ours: a dense one would cost every form but ours k
    rows.
    """
    return functional.embedding(ids, weight, sparse=True)


def _positive_logits(z: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    centers = functional.normalize(_rows(weight, labels), dim=2)
    return SCALE * with_margin(torch.einsum("bd,bld->bl", z, centers))


def _negative_logits(z: Tensor, weight: Tensor, drawn: Tensor, labels: Tensor) -> Tensor:
    logits = SCALE * z @ _unit(_rows(weight, drawn)).T
    slots = torch.searchsorted(drawn, labels).clamp_max(len(drawn) - 1)
    rows, columns = (drawn[slots] == labels).nonzero(as_tuple=True)
    own = torch.zeros_like(logits, dtype=torch.bool)
    own[rows, slots[rows, columns]] = True
    return logits.masked_fill(own, -torch.inf)


def _materialized(
    embeddings: Tensor, weight: Tensor, labels: Tensor, ratio: float, step: int
) -> Tensor:
    z = _unit(embeddings)
    drawn = draw_negatives(weight.shape[0], ratio, seed=0, step=step, device=weight.device)
    return mlcd_loss(
        _positive_logits(z, weight, labels), _negative_logits(z, weight, drawn, labels)
    )


def _per_column(
    embeddings: Tensor, weight: Tensor, labels: Tensor, ratio: float, step: int
) -> Tensor:
    z = _unit(embeddings)
    positives = _positive_logits(z, weight, labels)
    losses = []
    for column in range(labels.shape[1]):
        own = labels[:, column : column + 1]
        drawn = draw_negatives(
            weight.shape[0],
            ratio,
            seed=column,
            step=step,
            policy="partialfc",
            labels=own,
            device=weight.device,
        )
        negatives = _negative_logits(z, weight, drawn, own)
        losses.append(cd_loss(positives[:, column : column + 1], negatives))
    return torch.stack(losses).mean()


def _dense(
    embeddings: Tensor,
    weight: Tensor,
    labels: Tensor,
    ratio: float,  # noqa: ARG001
    step: int,  # noqa: ARG001
) -> Tensor:
    return functional.cross_entropy(SCALE * _unit(embeddings) @ _unit(weight).T, labels[:, 0])


def measure(form: str, options: argparse.Namespace) -> None:
    """Prints time and peak memory of one pass per request, as JSON; in a process of its own."""
    run, drop = passes(form, options)
    run(0)  # libraries allocate their workspaces once
    run(-1)
    drop()
    before = _start_of_peak(options.device)
    gradient_bytes = run(1)
    peak = _peak(options.device) - before
    print(
        json.dumps({"activation_bytes": peak - gradient_bytes, "gradient_bytes": gradient_bytes}),
        flush=True,
    )
    for step, _ in enumerate(sys.stdin, start=1):
        started = time.perf_counter()
        run(step)
        _finish(options.device)
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _start_of_peak(device: str) -> int:
    """Returns the bytes in use, from which the peak counts anew."""
    _finish(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    return before


def _peak(device: str) -> int:
    _finish(device)
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return 1024 * int(line.split()[1])


def compare(num_classes: int, options: argparse.Namespace) -> None:
    forms = [
        form
        for form in FORMS
        if form != "dense" or 12 * options.batch * num_classes < options.memory_gib * 2**30
    ]
    if options.device == "cpu":  # which has no TF32
        forms = [form for form in forms if form not in SHORTENED]
    shape = ["--batch", options.batch, "--dimension", options.dimension, "--ratio", options.ratio]
    shape += ["--device", options.device]
    workers = {
        form: subprocess.Popen(
            # Every tensor is allocated by mmap, so that freed memory is returned and the peak is of
            # live tensors.
            [
                "env",
                "MALLOC_MMAP_THRESHOLD_=65536",
                sys.executable,
                __file__,
                "--form",
                form,
                "--num-classes",
                *map(str, [num_classes, *shape]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for form in forms
    }
    memory = {}
    for form, worker in workers.items():
        try:
            memory[form] = _answer(worker)
        except json.JSONDecodeError:
            print(f"{form}: left out, its process ended with status {worker.wait()}")
    seconds: dict[str, list[float]] = {form: [] for form in memory}
    for _ in range(options.runs):
        for form, worker in workers.items():
            if form not in memory:
                continue
            assert worker.stdin is not None
            worker.stdin.write("run\n")
            worker.stdin.flush()
            seconds[form].append(_answer(worker)["seconds"])
    print(
        f"\nk = {num_classes}, B = {options.batch}, d = {options.dimension}, r = {options.ratio}, "
        f"l = {LABELS}"
    )
    for form, times in seconds.items():
        ratio = statistics.median(
            theirs / ours for theirs, ours in zip(times, seconds["ours"], strict=True)
        )
        print(
            f"  {form:13} {statistics.median(times):7.3f} s ({min(times):.3f} to "
            f"{max(times):.3f}), {ratio:5.2f}x ours,"
            f" activations {memory[form]['activation_bytes'] / MIB:7.1f} MiB"
            f" beside a gradient of {memory[form]['gradient_bytes'] / MIB:.1f} MiB"
        )
    for worker in workers.values():
        worker.communicate()


def _answer(worker: "subprocess.Popen[str]") -> dict[str, float]:
    assert worker.stdout is not None
    answer: dict[str, float] = json.loads(worker.stdout.readline())
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--classes", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--ratio", type=float, default=0.1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--memory-gib", type=float, default=8.0, help="skip the dense form where it needs more"
    )
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    parser.add_argument("--num-classes", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.form:
        measure(options.form, options)
        return
    where = f"{torch.get_num_threads()} threads"
    where = torch.cuda.get_device_name() if options.device == "cuda" else where
    print(f"torch {torch.__version__}, {where}")
    for num_classes in options.classes:
        compare(num_classes, options)


if __name__ == "__main__":
    main()
