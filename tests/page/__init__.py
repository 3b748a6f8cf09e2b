"""Tests of the page; fixtures of the scope of this package end with its last test."""
