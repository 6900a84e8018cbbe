"""A user whom permissions concern, as they do not concern root."""

import contextlib
import os
import tempfile
from pathlib import Path


@contextlib.contextmanager
def nobody():
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@contextlib.contextmanager
def open_folder():
    """Yields a folder that others than its owner may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)
