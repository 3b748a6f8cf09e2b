"""The HTTP server shell (aiohttp) shared by the registry, the worker and the node."""

PRODUCT = "aimage"  # in headers (RFC 9110, "Server")
