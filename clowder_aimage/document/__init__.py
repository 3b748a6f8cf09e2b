"""Untrusted documents: JSON, YAML and templates, read with bounds and checked by schemas."""
