"""Formats of models other than diffusers pipelines: one module for each, and ``detect``.

Each has ``take(path)``. It reads headers but no weights, and returns the inventory.
"""
