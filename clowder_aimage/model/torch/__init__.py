"""Image models on PyTorch: networks of this project, with tensors from blobs.

Only this package imports PyTorch; diffusers is imported for its attention backends, if one is
selected. The steps of a generation are those of ``clowder_aimage.model.flow``, as for MLX.
"""
