"""The Python interface (docs/python.md). The package ``clowder_aimage`` exports its names."""
