"""Image models on PyTorch: networks of diffusers and transformers, with tensors from blobs.

Only this package imports PyTorch, diffusers and transformers; the steps of a generation are those
of ``clowder_aimage.model.flow``, which are the same for MLX.
"""
