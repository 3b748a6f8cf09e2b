"""The layout served as a registry: the OCI distribution API on the project's one HTTP server.

A request takes this way: ``serve`` (a listening socket) -> ``guard`` (who asks, may they write,
errors as JSON) -> the table of routes in ``app`` -> ``blob``, ``push``, ``manifest``,
``tag`` or ``referrer`` -> ``catalog`` and ``upload``, which know the layout and nothing of HTTP.

Nothing is imported here: aiohttp comes with an extra and is loaded by ``serve`` alone.
"""
