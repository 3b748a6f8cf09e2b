"""Signed statements about the origin of pictures: manifests of C2PA, written and checked."""
