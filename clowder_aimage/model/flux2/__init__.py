"""FLUX.2 [klein]: a diffusion transformer of two streams, then one, with reference pictures.

The numerical reference is ``Flux2KleinPipeline`` of diffusers 0.42; tests/parity compares random
models with it.
"""
