"""Run the command line: ``python -m clowder_aimage.cli``."""

from clowder_aimage.cli.main import main

main()
