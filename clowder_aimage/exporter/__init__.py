"""Export of an AImage from a store to a model directory: plan (every decision) -> write.

Tensors are collected into the files that the model's library expects, whole files are written
unchanged, and tars from other packaging tools are unpacked.
"""
