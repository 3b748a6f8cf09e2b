"""Limits of each package: its lines and its coverage."""

from __future__ import annotations

# The lines, raised only with a record in docs/adr/ (0016, 0017), and the coverage of lines and
# branches together in per cent, rounded down, which only rises. "." is the root's modules.
PACKAGES = {
    ".": (2_890, 97),
    "api": (2_330, 95),
    "cli": (5_550, 93),
    "content": (2_430, 97),
    "dialect": (1_420, 98),
    "distribution": (1_990, 53),  # most of its tests serve in a child process, see 0016
    "engine": (2_800, 88),
    "exporter": (1_300, 97),
    "formats": (2_800, 97),
    "http": (1_360, 87),
    "importer": (2_640, 98),
    "layout": (2_740, 96),
    "model": (3_600, 96),
    "node": (3_600, 94),
    "oci": (660, 99),
    "registry": (3_040, 97),
    "tensor": (1_070, 98),
}
