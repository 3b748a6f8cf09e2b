"""The engine: models in memory, queued requests, and transfers.

Each model runs in its own process (``process``), controlled by a ``Runner``. The ``Engine`` admits
requests; the ``ModelScheduler`` selects the models to load and the request to serve next.
"""
