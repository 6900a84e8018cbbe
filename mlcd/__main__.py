"""`python -m mlcd` is `mlcd`."""

from mlcd.cli import main

if __name__ == "__main__":
    main()
