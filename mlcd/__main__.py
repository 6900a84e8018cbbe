"""The command `mlcd`, also run by `python -m mlcd`."""

import os
import signal


def main() -> None:
    """Runs `mlcd.cli.main`. Its import takes half a second, during which Ctrl-C must not leave a
    traceback.
    """
    handler = signal.getsignal(signal.SIGINT)
    # otherwise it is ignored, as under `nohup`, and stays so
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # numpy's OpenBLAS reads this when it is imported: after a product its threads spin for 2^16
    # cycles before they sleep, and not for 2^26. Else the look-ups of a server would occupy a core
    # that decodes or encodes images.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "16")  # noqa: TID251
    from mlcd.cli import main as run

    signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":
    main()
