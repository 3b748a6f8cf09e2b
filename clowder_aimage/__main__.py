"""The program: ``aimage``, and ``python -m clowder_aimage``."""

import importlib
import signal


def main() -> None:
    """Run the command line. An interrupt during its import ends the process without a traceback."""
    # A process in the background of a shell without job control ignores interrupts already.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    importlib.import_module("clowder_aimage.cli.main").main()


if __name__ == "__main__":
    main()
