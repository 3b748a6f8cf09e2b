"""AI models as OCI artifacts: create, push, pull and run them."""

__version__ = "0.1.0"
