"""The commands that follow a finished training, as they can be copied."""

import shlex

from mlcd.artifacts.manifest import Artifact
from training.pairs.pairs_config import PairsConfig, validate_any
from training.run.run_files import read_run_fields


def next_commands(run: Artifact) -> list[str]:
    """Returns the commands that evaluate and serve `run`.

    Images without classes, and those of a mixture or of a run that held none out, have no held-out
    images to classify: their patches are drawn.
    """
    path, config = str(run.path), validate_any(read_run_fields(run.path))
    if isinstance(config, PairsConfig):
        evaluate = ["retrieval", path, "--test", config.data.pairs, "--seen"]
    elif config.data.hold_out and not config.data.mix and run.summary.get("image_classes", 0) > 1:
        evaluate = ["knn", path]
    else:
        evaluate = ["pca", path, config.data.sources[0].images, "--out", f"{path}-patches.png"]
    commands = (["evaluate", *evaluate], ["serve", "--model", path])
    return [shlex.join(["mlcd", *command]) for command in commands]
