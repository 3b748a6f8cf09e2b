"""Run the command line: ``python -m clowder_aimage``."""

from clowder_aimage.cli.main import main

main()
