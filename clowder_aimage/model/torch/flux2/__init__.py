"""The networks of FLUX.2 [klein] on PyTorch."""
