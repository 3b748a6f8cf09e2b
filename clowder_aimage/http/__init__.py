"""The HTTP server shell (aiohttp) that the registry, the worker and the node share."""
