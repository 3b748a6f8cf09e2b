"""The HTTP server shell (aiohttp) shared by the registry, the worker and the node."""

# The name in the headers Server and User-Agent (RFC 9110)
PRODUCT = "aimage"
