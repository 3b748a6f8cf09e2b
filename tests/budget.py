"""Limits of each package: its lines and its coverage."""

from __future__ import annotations

# The lines, raised only with a record in docs/adr/ (0016, 0017), and the coverage of lines and
# branches together in per cent, rounded down, which only rises. "." is the root's modules.
PACKAGES = {
    ".": (3_820, 97),
    "api": (2_430, 95),
    "cli": (6_760, 93),
    "content": (2_440, 97),
    "dialect": (1_440, 98),
    "distribution": (2_050, 53),  # most of its tests serve in a child process, see 0016
    "engine": (2_840, 88),
    "exporter": (1_330, 97),
    "formats": (3_020, 97),
    "http": (1_500, 87),
    "importer": (2_680, 98),
    "layout": (2_860, 96),
    "model": (3_630, 96),
    "node": (3_470, 94),
    "oci": (670, 99),
    "registry": (3_260, 97),
    "tensor": (1_070, 98),
}
