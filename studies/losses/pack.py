"""One file of at most 50 MB with all that a tier's runs need besides the repository.

    python -m studies.losses.pack --tier gpu --data DATA --out STATE FILE.tar

On the other machine run `tar -xf FILE.tar -C STATE`, and then `python -m studies.losses
--tier gpu --out STATE --minutes 10`.
"""

import argparse
import sys
import tarfile
from pathlib import Path
from typing import Final

from mlcd.errors import InvalidInput, MlcdError
from studies.losses.arms import Variant
from studies.losses.run import Study
from studies.losses.tiers import TIERS

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
        study = Study(TIERS[options.tier], options.data, options.out / options.tier)
        print(f"{pack(study, options.file)} bytes")
    except MlcdError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def pack(study: Study, file: Path) -> int:
    """Prepares the study, writes the tar by rename and returns its size.

    Raises InvalidInput above MAX_BYTES.
    """
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
