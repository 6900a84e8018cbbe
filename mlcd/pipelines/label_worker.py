"""The process `python -m mlcd.pipelines.label_worker`, which makes parts of labels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlcd.artifacts.draft import Draft
from mlcd.errors import Conflict
from mlcd.images.quiet import silence_decoders
from mlcd.pipelines.label import LabelOptions, make_parts, open_labeling
from mlcd.pipelines.workers import serve_as_worker


def work(task: dict[str, Any], on_progress: Callable[[int, int], None]) -> None:
    """Makes every part that no other worker makes.

    The draft is not entered as a context: the parent process holds its lock.
    """
    out = Path(task["out"])
    with open_labeling(
        LabelOptions.from_dict(task["options"]), out, num_threads=task["num_threads"]
    ) as labeling:
        if labeling.identity != task["identity"]:
            raise Conflict(
                f"the input of {out} changed since the command started",
                remedy="give another output directory",
            )
        make_parts(labeling, Draft(out, labeling.request), wait=False, on_progress=on_progress)


if __name__ == "__main__":
    silence_decoders()
    serve_as_worker(work)
