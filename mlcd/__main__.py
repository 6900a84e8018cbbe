"""The command `mlcd`, also run by `python -m mlcd`."""

import signal


def main() -> None:
    """Runs `mlcd.cli.main`. Its import takes half a second, during which Ctrl-C must not leave a
    traceback.
    """
    handler = signal.getsignal(signal.SIGINT)
    # otherwise it is ignored, as under `nohup`, and stays so
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mlcd.cli import main as run

    signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":
    main()
