"""One file of at most 50 MB with all that a tier's runs need, for a machine that has nothing but the repository.

python -m benchmarks.validation.pack --tier gpu --data DATA --out STATE FILE.tar
there:  tar -xf FILE.tar -C STATE, then python -m benchmarks.validation --tier gpu --out STATE --minutes 10
"""

import argparse
import sys
import tarfile
from pathlib import Path
from typing import Final

from benchmarks.validation.arms import Variant
from benchmarks.validation.run import Study
from benchmarks.validation.tiers import TIERS
from mlcd.errors import InvalidInput, MlcdError

MAX_BYTES: Final = 50_000_000


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    travelling = sorted(name for name, tier in TIERS.items() if tier.packed_per_class is not None)
    parser.add_argument("--tier", choices=travelling, required=True)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument(
        "--out", type=Path, default=Path("validation"), help="state; default: validation/"
    )
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    try:
        print(
            f"{pack(Study(TIERS[options.tier], options.data, options.out / options.tier), options.file)} bytes"
        )
    except MlcdError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def pack(study: Study, file: Path) -> int:
    """Prepare the study, write the tar by rename, return its size. Raises InvalidInput above MAX_BYTES."""
    study.prepare()
    labels = study.pretraining.prepare(Variant())
    tables = sorted(
        path for path in (study.state / "sets").iterdir() if path.suffix in (".json", ".zip")
    )
    written = file.with_name(file.name + ".partial")
    with tarfile.open(written, "w") as archive:
        for path in (study.pretraining.photographs, labels, *tables):
            archive.add(path, Path(study.tier.name) / path.relative_to(study.state))
    size = written.stat().st_size
    if size > MAX_BYTES:
        written.unlink()
        raise InvalidInput(
            f"{size} bytes are more than {MAX_BYTES}", remedy="lower the tier's caps"
        )
    written.rename(file)
    return size


if __name__ == "__main__":
    sys.exit(main())
