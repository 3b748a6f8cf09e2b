"""The engine: models in memory, queued requests, and transfers.

Each model runs in its own process (``process``), controlled by a ``Runner``. The ``Engine`` admits
requests; the ``ModelScheduler`` decides which models are loaded and which request is served next.
"""
