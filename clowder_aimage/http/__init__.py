"""The HTTP server shell (aiohttp) shared by the registry, the worker and the node."""

# In headers (RFC 9110, "Server")
PRODUCT = "aimage"
