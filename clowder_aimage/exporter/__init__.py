"""Export of an AImage from a store to a model directory: plan (all decisions) -> write.

Tensors are gathered into the files of the model's library, whole files are written unchanged, and
tars from other packaging tools are unpacked.
"""
