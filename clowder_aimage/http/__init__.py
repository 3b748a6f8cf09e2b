"""The HTTP server shell (aiohttp) that the registry, the worker and the node share."""

PRODUCT = "aimage"  # in headers (RFC 9110, "Server")
