"""The command `mlcd`, which `python -m mlcd` is too."""

import signal


def main() -> None:
    """`mlcd.cli.main`, whose import takes half a second: Ctrl-C meanwhile leaves no traceback of an
    import.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # else it is ignored, as by `nohup`, and stays so
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mlcd.cli import main as run

    signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":
    main()
