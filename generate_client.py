"""Writes the synchronous client from the asynchronous one: `make client`.

What no replacement of words can express is in `mlcd/client/waiting.py`, by hand.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

CLIENT: Final = Path(__file__).parent / "mlcd" / "client"
_DOCSTRING: Final = '''"""The client for programs without an event loop.

`make client` writes this file from `asynchronous.py`: change that one.
"""
'''
_REPLACEMENTS: Final = (
    (r'\A""".*?"""\n', _DOCSTRING),
    (r"\basync (?=def|for|with)|\bawait ", ""),
    (r"\bAsync(?=(Client|Generator|Iterator)\b)", ""),
    (r"\bAsync(?=[A-Z])", "Sync"),
    (r"\b(__)?a(?=(close|closing|enter__|exit__)\b)", r"\1"),
)
# What those leave: loops that only collect or yield, and doubled or unsorted imports.
_FIXES: Final = "C416,F401,I001,UP028"


def synchronous(source: str) -> str:
    """Returns the synchronous form of the asynchronous client's source."""
    for pattern, replacement in _REPLACEMENTS:
        source = re.sub(pattern, replacement, source, flags=re.DOTALL)
    fixed = _ruff(source, "check", "--fix-only", "--unsafe-fixes", "--quiet", f"--select={_FIXES}")
    return _ruff(fixed, "format", "--quiet")


def _ruff(source: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", CLIENT / "_.py", "-"]
    options: dict[str, Any] = {"cwd": CLIENT, "capture_output": True, "text": True}
    return subprocess.run(command, input=source, check=True, **options).stdout


if __name__ == "__main__":
    asynchronous = (CLIENT / "asynchronous.py").read_text()
    (CLIENT / "synchronous.py").write_text(synchronous(asynchronous))
