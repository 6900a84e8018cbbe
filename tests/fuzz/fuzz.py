"""Coverage-guided fuzzing of one target with atheris: `python fuzz.py TARGET [options of
libFuzzer]`; `make fuzz`.
"""

import logging
import sys
import tempfile
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parents[2]


def main():
    name, *options = sys.argv[1:]
    sys.path.insert(0, str(ROOT))
    with atheris.instrument_imports(
        include=[
            "mlcd.images",
            "mlcd.service.http",
            "mlcd.service.http.problems",
            "python_multipart",
            "PIL",
        ]
    ):
        from PIL import Image

        from mlcd.images.quiet import silence_decoders
        from tests.fuzz.seeds import seeds
        from tests.fuzz.targets import TARGETS

        Image.init()  # its readers are imported by it, and only here are they watched
    silence_decoders()
    logging.disable()
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds(name)):
            (Path(corpus) / str(number)).write_bytes(seed)
        atheris.Setup([sys.argv[0], *options, corpus], TARGETS[name])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
