"""From an AImage in a store to the directory it was made from: plan (every decision) -> write.

Tensors are gathered into the files that the model's library looks for, whole files are written as
they are, and what a neighbour packed into a tar is unpacked.
"""
