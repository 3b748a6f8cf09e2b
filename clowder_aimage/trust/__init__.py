"""Signatures: their formats, signers, and the decision which of them count."""
