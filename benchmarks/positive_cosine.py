"""Where the cosine of positives comes to rest: scale, margin and bias, Eq. 5 (MLCD) against Eq. 4 (MLC).

    python benchmarks/positive_cosine.py [--embeddings DIR --labels DIR] [--steps 600] [--seed 0]
                                         [--margins arcface cosface none] [--out FILE.json]

Without artifacts: a toy of 1,024 free embeddings and 2,000 random classes in 64 dimensions, 8 nearest classes each.
With an embeddings artifact and its labels: a network of two layers (to 128 dimensions) on the frozen embeddings, one
tenth of the samples held out.

Eq. 5 stops pulling a sample's l positives where their log-sum passes 0, that is where s cos(theta + m) + b = ln l;
`predicted` is that cosine. `precision@l` is the share of a sample's own labels among its l nearest learned centers:
of the held-out samples where there are any, else of all.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.labels import LabelTable
from mlcd.losses.margins import MarginKind
from training.parallel.partial_fc import HeadConfig, PartialFC

LABELS, CHECKPOINTS = 8, (0.02, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class Problem:
    """name; what gives (rows, labels) of a step; the network; held-out inputs and labels; dimension; classes."""

    name: str
    batches: Callable[[int], Iterator[tuple[Tensor, Tensor]]]
    network: Callable[[], nn.Module]
    judged: tuple[Tensor, Tensor]
    dimension: int
    num_classes: int
    learning_rate: float


@dataclass(frozen=True)
class Outcome:
    """positive_cosine at the shares CHECKPOINTS of the steps; the rest at the end, means over the last tenth."""

    problem: str
    kind: str
    margin_kind: str
    scale: float
    bias: float
    predicted: float | None
    positive_cosine: list[float]
    negative_cosine: float
    sigma_positive: float
    sigma_negative: float
    precision: float
    seconds: float


class _Free(nn.Module):
    """An embedding for every sample, free to go anywhere."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(start.clone())

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows[ids]


def toy(
    seed: int, num_samples: int = 1024, num_classes: int = 2000, dimension: int = 64
) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    samples, classes = (
        normalize(torch.randn((num, dimension), generator=generator), dim=1)
        for num in (num_samples, num_classes)
    )
    labels = (samples @ classes.T).topk(LABELS, dim=1).indices
    start = torch.randn((num_samples, dimension), generator=generator) / math.sqrt(dimension)
    ids = torch.arange(num_samples)

    def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield from ((ids, labels) for _ in range(steps))

    return Problem(
        "toy",
        batches,
        lambda: _Free(start),
        (ids, labels),
        dimension,
        num_classes,
        learning_rate=0.01,
    )


def photographs(
    embeddings: Path, labels: Path, seed: int, batch: int = 512, dimension: int = 128
) -> Problem:
    source, table = EmbeddingsArtifact.open(embeddings), LabelTable.open(labels)
    rows = torch.from_numpy(source.load())
    row_of_key = table.row_of_key()
    ids = torch.from_numpy(table.ids[[row_of_key[key] for key in source.keys]]).long()
    held_out = torch.from_numpy(source.held_out(0.1))
    rows = rows - rows[~held_out].mean(dim=0)
    rows = rows / rows.std()
    known, known_labels = rows[~held_out], ids[~held_out]

    def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            chosen = torch.randint(len(known), (batch,), generator=generator)
            yield known[chosen], known_labels[chosen]

    def network() -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(rows.shape[1], 512), nn.GELU(), nn.Linear(512, dimension))

    return Problem(
        "photographs",
        batches,
        network,
        (rows[held_out], ids[held_out]),
        dimension,
        table.num_centers,
        1e-3,
    )


def train(problem: Problem, config: HeadConfig, steps: int) -> Outcome:
    started = time.perf_counter()
    network = problem.network()
    head = PartialFC(problem.num_classes, problem.dimension, replace(config, center_update="dense"))
    head.initialize(config.seed)
    with torch.no_grad():
        head.weight.mul_(100 / math.sqrt(problem.dimension))  # rows of about unit length
    optimizer = torch.optim.Adam(
        [*network.parameters(), *head.parameters()], lr=problem.learning_rate
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    history: list[dict[str, float]] = []
    for step, (rows, labels) in enumerate(problem.batches(steps)):
        optimizer.zero_grad()
        output = head(network(rows), labels, step)
        output.loss.backward()
        optimizer.step()
        schedule.step()
        history.append({name: meter.item() for name, meter in output.meters.items()})
    last = history[-max(1, steps // 10) :]

    def at_end(name: str) -> float:
        return sum(meters[name] for meters in last) / len(last)

    curve = [
        history[max(0, round(share * steps) - 1)]["positive_cosine"] for share in CHECKPOINTS[:-1]
    ]
    return Outcome(
        problem.name,
        config.kind,
        config.margin_kind,
        config.scale,
        config.bias,
        resting_cosine(config) if config.kind == "mlcd" else None,
        [*curve, at_end("positive_cosine")],
        at_end("negative_cosine"),
        at_end("sigma_positive"),
        at_end("sigma_negative"),
        precision(network, head, *problem.judged),
        time.perf_counter() - started,
    )


def resting_cosine(config: HeadConfig) -> float:
    """The cosine where s cos(theta + m) + b = ln l, with the margin of `config`; at most 1."""
    lowered = (math.log(LABELS) - config.bias) / config.scale
    if config.margin_kind == "none":
        return min(1.0, lowered)
    if config.margin_kind == "cosface":
        return min(1.0, lowered + config.margin)
    return math.cos(max(0.0, math.acos(min(1.0, lowered)) - config.margin))


@torch.no_grad()
def precision(network: nn.Module, head: PartialFC, inputs: Tensor, labels: Tensor) -> float:
    nearest = (
        (normalize(network(inputs), dim=1) @ head.unit_centers().T)
        .topk(labels.shape[1], dim=1)
        .indices
    )
    return (nearest[:, :, None] == labels[:, None]).any(dim=2).float().mean().item()


def grid(margins: Sequence[MarginKind], seed: int) -> Iterator[HeadConfig]:
    """Every scale and loss with each margin, then Eq. 5 with ArcFace and some biases."""
    for margin_kind in margins:
        for scale in (8.0, 16.0, 32.0, 64.0):
            for kind in ("mlcd", "mlc"):
                yield HeadConfig(
                    kind=kind, scale=scale, margin_kind=margin_kind, negative_ratio=1.0, seed=seed
                )
    for scale, biases in ((16.0, (-4.0, -8.0)), (64.0, (-10.0, -20.0, -30.0))):
        for bias in biases:
            yield HeadConfig(scale=scale, bias=bias, negative_ratio=1.0, seed=seed)


def print_row(outcome: Outcome) -> None:
    predicted = "" if outcome.predicted is None else f"{outcome.predicted:.3f}"
    curve = " | ".join(f"{cosine:.3f}" for cosine in outcome.positive_cosine)
    print(
        f"| {outcome.margin_kind} | {outcome.scale:g} | {outcome.bias:g} | {outcome.kind} | {predicted} | {curve}"
        f" | {outcome.negative_cosine:+.3f} | {outcome.sigma_positive:.2f} | {outcome.sigma_negative:.2f}"
        f" | {outcome.precision:.3f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--embeddings", type=Path)
    parser.add_argument("--labels", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--margins",
        nargs="*",
        choices=("arcface", "cosface", "none"),
        default=["arcface", "cosface", "none"],
    )
    parser.add_argument("--out", type=Path, help="the figures as JSON")
    options = parser.parse_args()
    if (options.embeddings is None) != (options.labels is None):
        parser.error("--embeddings and --labels belong together")
    problem = (
        toy(options.seed)
        if options.labels is None
        else photographs(options.embeddings, options.labels, options.seed)
    )
    print(
        f"{problem.name}: k = {problem.num_classes}, d = {problem.dimension}, l = {LABELS}, {options.steps} steps\n"
    )
    shares = " | ".join(f"cos+ at {share:.0%}" for share in CHECKPOINTS)
    print(
        f"| margin | s | b | loss | predicted | {shares} | cos- | sigma(LSEp) | sigma(LSEn) | precision@{LABELS} |"
    )
    print("|---|" + "---:|" * 2 + "---|" + "---:|" * (len(CHECKPOINTS) + 5))
    outcomes = []
    for config in grid(options.margins, options.seed):
        outcomes.append(train(problem, config, options.steps))
        print_row(outcomes[-1])
    if options.out is not None:
        options.out.write_text(
            json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
