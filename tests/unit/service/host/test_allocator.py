import subprocess
import sys

PROGRAM = """
import gc
import service.http.app
from service.host.allocator import keep_what_is_open

class Node:
    ended = 0
    def __del__(self):
        Node.ended += 1

def cycle():
    node = Node()
    node.itself = node
    return node

cycle()
closed_later = cycle()
keep_what_is_open()
print(Node.ended, len(gc.get_objects()) < 100, gc.isenabled())
del closed_later
keep_what_is_open()
print(Node.ended)
"""


def test_what_is_open_is_collected_once_and_then_out_of_sight():
    """In a process of its own: this one must not keep all that the tests leave."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.stdout.split() == ["1", "True", "True", "2"], result.stderr
