import subprocess
import sys

PROGRAM = """
import gc
import mlcd.service.http.app
from mlcd.service.host.allocator import (
    free_what_was_closed,
    keep_what_is_imported,
    keep_what_is_open,
    pause_collector,
)


class Node:
    ended = 0
    def __del__(self):
        Node.ended += 1

def cycle():
    node = Node()
    node.itself = node
    return node

pause_collector()
cycle()
keep_what_is_imported()
cycle()
closed_later = cycle()
keep_what_is_open()
print(Node.ended, len(gc.get_objects()) < 100, gc.isenabled())
del closed_later
gc.collect()
print(Node.ended)
free_what_was_closed()
print(Node.ended, len(gc.get_objects()) < 100)
"""


def test_what_is_open_is_out_of_sight_until_it_is_closed():
    """In a process of its own: this one must not keep all that the tests leave."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.stdout.split() == ["1", "True", "True", "1", "3", "True"], result.stderr
