"""The layout as a registry: the OCI distribution API as a role of the HTTP server.

A request passes the middlewares of ``http/app`` and a route of ``role`` to one of the
``*_routes`` modules; the others do not depend on HTTP. In a cache of another registry, reads go
through ``cache``. This module imports nothing, since aiohttp is an optional dependency.
"""
