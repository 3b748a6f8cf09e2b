"""The layout served as a registry: the OCI distribution API on the project's one HTTP server.

A request takes this way: ``serve`` (a listening socket) -> ``idle`` and ``guard`` (who asks, may
they write, errors as JSON) -> the table of routes in ``app`` -> ``blob``, ``push``, ``manifest``,
``tag`` or ``referrer`` -> ``catalog`` (names), ``shelf`` (blobs) and ``upload``, which know the
layout and nothing of HTTP.

As the cache of another registry, reads go through ``cache``: ``upstream`` is asked in threads, a
``fetch`` brings one blob that many clients read as it grows, and ``waiting`` gives a manifest its
name when all of it is here.

Nothing is imported here: aiohttp comes with an extra and is loaded by ``serve`` alone.
"""
