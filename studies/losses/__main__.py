"""Runs the study, or goes on with it, and then writes its numbers.

    python -m studies.losses --tier frozen|towers|mosaics|scales|gpu|cpu --data DIR [--out DIR]
                             [--only RUN] [--max-runs N] [--minutes M] [--jobs N] [--references]

RUN is a run's name, such as mobilenet/mlcd/seed1; the raw numbers have a command for each. Finished
runs are never repeated, and after --minutes the same command goes on: runs of seconds are ended,
those of minutes are saved (`gpu`: --minutes 9). After each call the rows of all finished runs are
written to RESULTS/TIER.parquet, beside those of runs that this state does not have. If another
state made a run before, the number of equal results is printed. `python -m studies.losses.verdict`
says what the rows mean.

`cpu` is the first study. Its runs are named as report/mlcd-seed1-lr0.001-s8-r1-steps480 (one of
instance discrimination starts anew if it is interrupted), and their curves are in
RESULTS/cpu-curves.parquet.
"""

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Final

from mlcd.cores import available_cores
from mlcd.errors import InvalidInput, MlcdError
from mlcd.training.preemption import Preempted
from studies.losses.arms import RunSpec
from studies.losses.data import require
from studies.losses.frozen.tier import FrozenTier
from studies.losses.instrument.slices import SlicedTier, run_slices
from studies.losses.mosaics.tier import MosaicsTier
from studies.losses.plan import due
from studies.losses.references import perform_references
from studies.losses.run import Study, perform
from studies.losses.scales.tier import ScalesTier
from studies.losses.sets import FASHION, SINGLE_LABEL
from studies.losses.table import RESULTS, gather
from studies.losses.tiers import TIERS
from studies.losses.towers.tier import GpuTier, TowersTier

_SLICED: Final[dict[str, Callable[[Path, Path], SlicedTier]]] = {
    FrozenTier.name: FrozenTier.of,
    MosaicsTier.name: MosaicsTier.of,
    ScalesTier.name: ScalesTier.of,
    TowersTier.name: TowersTier.of,
    GpuTier.name: GpuTier.of,
}


def main() -> int:
    options = _parsed()
    try:
        if (sliced := _SLICED.get(options.tier)) is not None:
            run_slices(sliced(options.data, options.out), options)
        else:
            _run_first_study(options)
    except MlcdError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _run_first_study(options: argparse.Namespace) -> None:
    study = Study(TIERS[options.tier], options.data, options.out / options.tier)
    # Existing sets are complete.
    if not (study.state / "sets").is_dir():
        require(study.data, ["tiny_imagenet_pretrain", *SINGLE_LABEL, FASHION])
    if options.run is not None:
        # A preempted run has saved, and goes on when it is run again.
        with suppress(Preempted):
            perform(study, RunSpec.parse(options.run))
        return
    only = (
        None
        if options.only is None
        else [RunSpec.parse(name) for name in dict.fromkeys(options.only)]
    )
    study.prepare()
    if not options.references:
        _run_all(study, options, only)
    if study.tier.references and (
        options.references or next(due(study.tier, study.scores()), None) is None
    ):
        perform_references(study)
    for repeated in gather(study, options.results):
        print(repeated)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tier", choices=sorted([*TIERS, *_SLICED]), required=True)
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(),
        help="the folder of the data sets",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("validation"), help="state; default: validation/"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where the numbers are written"
    )
    parser.add_argument(
        "--only", action="append", metavar="RUN", help="only the run of this name; may be repeated"
    )
    parser.add_argument("--max-runs", type=int, help="stop after so many")
    parser.add_argument("--minutes", type=float, help="then save what is running, and stop")
    parser.add_argument(
        "--jobs", type=int, default=0, help="runs at a time; default: one for each core, or GPU"
    )
    parser.add_argument(
        "--references", action="store_true", help="only floors and ceilings; else they come last"
    )
    # These options are given to the processes of single runs.
    parser.add_argument("--run", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run_all(study: Study, options: argparse.Namespace, only: Sequence[RunSpec] | None) -> None:
    """Starts due runs while there are any.

    Raises InvalidInput if a run fails, after the others have ended.
    """
    jobs = options.jobs or (1 if study.tier.device == "cuda" else available_cores())
    left = options.max_runs if options.max_runs is not None else sys.maxsize
    deadline = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    running: dict[Future[int], RunSpec] = {}
    failed: list[str] = []
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            under_way = {spec.name for spec in running.values()}
            waiting = [spec for spec in _wanted(study, only) if spec.name not in under_way]
            while (
                waiting
                and left > 0
                and len(running) < jobs
                and not failed
                and time.monotonic() < deadline
            ):
                spec = waiting.pop(0)
                running[pool.submit(_start, study, options, spec, deadline)] = spec
                left -= 1
            if not running:
                break
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                spec = running.pop(future)
                outcome = _outcome(study, spec, future.result(), deadline)
                print(f"{outcome} {spec.name}", flush=True)
                failed += [spec.name] if outcome == "failed" else []
    if failed:
        raise InvalidInput(
            f"{failed[0]} failed", remedy="its messages are above; the same command goes on"
        )


def _outcome(study: Study, spec: RunSpec, status: int, deadline: float) -> str:
    if study.is_done(spec):
        return "finished"
    return "interrupted" if time.monotonic() >= deadline or status == 0 else "failed"


def _wanted(study: Study, only: Sequence[RunSpec] | None) -> Iterator[RunSpec]:
    if only is None:
        return due(study.tier, study.scores())
    return (spec for spec in only if not study.is_done(spec))


def _start(study: Study, options: argparse.Namespace, spec: RunSpec, deadline: float) -> int:
    """Returns the exit status of the run's process; at the deadline the process saves and ends."""
    arguments = ["--tier", study.tier.name, "--data", str(options.data), "--out", str(options.out)]
    command = [sys.executable, "-m", "studies.losses", *arguments, "--run", spec.name]
    with subprocess.Popen(command) as process:
        try:
            return process.wait(
                None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            )
        except subprocess.TimeoutExpired:
            process.terminate()
            return process.wait()


if __name__ == "__main__":
    sys.exit(main())
