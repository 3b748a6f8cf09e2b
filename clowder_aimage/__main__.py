"""The program: ``aimage``, and ``python -m clowder_aimage``."""

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line. An interrupt during its import ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from clowder_aimage.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
