"""The engine: models in memory, requests that wait for them, and transfers.

Each model runs in a process of its own (``process``), controlled by a ``Runner``. The ``Engine``
admits requests; the ``ModelScheduler`` decides which models are loaded and which request is next.
"""
