"""Fuzzers: damaged documents, files, requests and answers, without end or for a number of cases.

Each target makes one case from a random generator. A case fails if it raises anything but the
errors for users, prints a control character, or takes longer than ``LIMIT`` seconds of CPU time.
"""
