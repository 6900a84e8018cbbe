"""Docker's older builder makes every stage that stands before the one that is asked for."""

import re
from pathlib import Path

import pytest

STAGE = re.compile(r"^FROM (\S+) AS (\S+)$", re.MULTILINE)
SOURCE = re.compile(r"^COPY --from=(\S+)", re.MULTILINE)


def stages() -> dict[str, set[str]]:
    """The stages in their order, each with those that it is made from."""
    text = (Path(__file__).resolve().parents[2] / "Dockerfile").read_text()
    _, *parts = re.split(r"^(?=FROM )", text, flags=re.MULTILINE)
    return {STAGE.match(part)[2]: {STAGE.match(part)[1], *SOURCE.findall(part)} for part in parts}


@pytest.mark.parametrize("target", ["api", "worker"])
def test_what_serves_is_built_without_the_packages_of_others(target):
    found = stages()
    before = list(found)[: list(found).index(target)]
    needed, asked = set(), [target]
    while asked:
        sources = found[asked.pop()] & found.keys()
        asked += sources - needed
        needed |= sources
    assert set(before) == needed
