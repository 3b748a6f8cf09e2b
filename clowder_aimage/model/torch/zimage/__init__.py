"""The networks of Z-Image on PyTorch."""
