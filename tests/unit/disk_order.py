"""The order in which a process syncs and renames: what a power cut would find."""

import contextlib
import os
from pathlib import Path


@contextlib.contextmanager
def recorded():
    """The steps of what runs within: ("sync", path) and ("rename", source, target). All of it is really done."""
    steps, fsync, rename = [], os.fsync, os.rename

    def synced(descriptor):
        steps.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def renamed(source, target, **options):
        steps.append(("rename", Path(source), Path(target)))
        rename(source, target, **options)

    os.fsync, os.rename = synced, renamed
    try:
        yield steps
    finally:
        os.fsync, os.rename = fsync, rename


def check_durable(steps, path, *, files=()):
    """What is at `path`, and the `files` in it, was on the disk before it was there; then its name was."""
    (place,) = (
        number for number, step in enumerate(steps) if step[0] == "rename" and step[2] == path
    )
    temporary = steps[place][1]
    assert temporary.parent == path.parent
    before = {step[1] for step in steps[:place]}
    assert {temporary, *(temporary / name for name in files)} <= before, steps
    assert ("sync", path.parent) in steps[place:], steps
