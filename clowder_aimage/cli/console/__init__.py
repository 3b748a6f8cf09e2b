"""Shared parts of the verbs: options, results, progress."""
