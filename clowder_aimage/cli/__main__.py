"""``python -m clowder_aimage.cli``: the command line without its script."""

from clowder_aimage.cli.main import main

main()
