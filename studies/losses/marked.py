"""Pages with marked blocks that a script fills, and the tables in them."""

import re
from collections.abc import Callable, Mapping, Sequence


def filled(page: str, blocks: Mapping[str, Callable[[], str]], mark: str) -> str:
    """Returns the page with every marked block made anew. Raises KeyError for an unknown block.

    A block is between `<!-- MARK: NAME -->` and `<!-- /MARK -->`.
    """
    pattern = re.compile(rf"<!-- {mark}: (\w+) -->\n.*?<!-- /{mark} -->", re.DOTALL)

    def block(found: re.Match[str]) -> str:
        return f"<!-- {mark}: {found[1]} -->\n\n{blocks[found[1]]()}\n\n<!-- /{mark} -->"

    return pattern.sub(block, page)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table: the first row is the header, and the first column has text."""
    header, *body = rows
    lines = ["| " + " | ".join(row) + " |" for row in (header, *body)]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(header) - 1), *lines[1:]])
