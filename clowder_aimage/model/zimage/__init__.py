"""Z-Image: a single-stream diffusion transformer with a Qwen text encoder and a Flux-style VAE.

The numerical reference is ``ZImagePipeline`` of diffusers 0.42; tests/parity compares every network
with it.
"""
