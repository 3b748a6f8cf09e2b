"""Image models on PyTorch: networks of diffusers and transformers, with tensors from blobs.

Only this package imports PyTorch, diffusers and transformers; the steps of a generation are those
of ``clowder_aimage.model.flow``, the same as for MLX.
"""
