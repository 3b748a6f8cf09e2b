"""Adapters of requests: found in the store or in a directory, and kept while they are used."""
