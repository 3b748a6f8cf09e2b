"""Models that run on MLX: weights from blobs, the pipeline protocol, and Z-Image.

Importing this package does not import MLX. ``clowder_aimage.model.backend`` is the one module
that does, after it has looked for a fast BLAS; every network takes ``mx`` and ``nn`` from there.
"""
