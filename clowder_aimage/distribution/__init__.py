"""The layout as a registry: the OCI distribution API as a role of the HTTP server.

A request passes the middlewares of ``http/app`` and a route of ``registry_role`` to one of the
``*_routes`` modules. These use ``catalog`` (names), ``served_blobs`` and ``upload_session``, which
know the layout and nothing of HTTP.

In a cache of another registry reads go through ``cache``: ``upstream`` is asked in threads, one
``blob_fetch`` serves many clients as it grows, and ``pending_manifest`` names a manifest when all
of it is here.

Nothing is imported here: aiohttp comes with an extra.
"""
