"""Docstrings open with a verb or a noun phrase, and the check of it notices a fragment."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FRAGMENT = re.compile(r"(Of|As|By|Where|What|Whether|Who)\b")


def fragments(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the first line of each docstring, of fields too, that opens with a
    fragment.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))) if FRAGMENT.match(text.lstrip()):
                yield node.lineno, text.strip().splitlines()[0]


def sources() -> Iterator[Path]:
    for package in ("mlcd", "training", "service", "benchmarks", "studies", "tests"):
        yield from (ROOT / package).rglob("*.py")
    yield from (ROOT / "docs").glob("*.py")


def test_no_docstring_opens_with_a_fragment():
    found = [
        f"{path.relative_to(ROOT)}:{line} {text}"
        for path in sorted(sources())
        for line, text in fragments(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""What the module holds."""',
        'class Step:\n    """Of one run."""',
        'def step():\n    """\n    Where it stops.\n    """',
        'async def step():\n    """Whether it stops."""',
        'class Step:\n    size: int\n    """As data.size."""',
    ],
)
def test_a_planted_fragment_is_found(source):
    assert len(list(fragments(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""Offers a step."""',
        'def step():\n    """Returns what it holds."""',
        'text = "Of one run."',
    ],
)
def test_a_sentence_is_let_through(source):
    assert list(fragments(source)) == []


def test_commands_on_pages_can_be_copied():
    """A block of commands holds no prompt; its output stands in another one."""
    prompts = []
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        blocks = re.findall(r"^ *```\w*\n(.*?)^ *```$", path.read_text(), re.DOTALL | re.MULTILINE)
        written_by_the_study = path.name.startswith("validation")
        if not written_by_the_study and any(re.search(r"^ *\$ ", b, re.MULTILINE) for b in blocks):
            prompts.append(str(path.relative_to(ROOT)))
    assert not prompts
