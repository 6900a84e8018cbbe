"""Decodes every file of a folder in a process that may not grow or linger: run by test_corpus.py.

    python decode_folder.py FOLDER exact|fast MEMORY_BYTES SECONDS_PER_FILE

One JSON line per file, then one with the peak of resident memory.
"""

import json
import re
import resource
import signal
import sys
import time
from pathlib import Path

from mlcd.errors import ImageRejected
from mlcd.images.transform import PreprocessSpec

SIDE = 16  # small, so that the corpus' small pictures are worth scaling


def main(folder, mode, memory_bytes, seconds):
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    spec = PreprocessSpec(SIDE, SIDE, decode=mode)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        line = {"path": path.relative_to(folder).as_posix()}
        sys.stderr.write(line["path"] + "\n")  # the last one is the one that died
        data = path.read_bytes()
        signal.setitimer(
            signal.ITIMER_REAL, seconds
        )  # nobody handles it: even C code that never returns is ended
        started = time.perf_counter()
        try:
            line["pixels"] = spec.prepare(data).tobytes().hex()
        except ImageRejected as rejection:
            line["reason"] = rejection.reason
        line["seconds"] = time.perf_counter() - started
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(json.dumps(line) + "\n")
    # Not ru_maxrss: a child's begins with its parent's, which here is all of pytest.
    peak_kib = int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])
    sys.stdout.write(json.dumps({"peak_bytes": 1024 * peak_kib}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
