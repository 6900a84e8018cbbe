"""A user whom permissions concern, as they do not concern root."""

import contextlib
import os


@contextlib.contextmanager
def nobody():
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
