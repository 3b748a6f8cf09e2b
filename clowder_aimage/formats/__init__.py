"""Models that are no diffusers pipeline: one module for each format, and ``detect``.

Each has ``take(path)``, which reads headers and never weights, and returns the inventory.
"""
