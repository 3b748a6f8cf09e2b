"""Adapters of requests: found in the store or in a directory, read, and kept while they are used."""
