"""Limits of each package: its lines and its coverage."""

from __future__ import annotations

# The lines of the page's scripts and styles, without the libraries in vendor/ (docs/adr/0034)
PAGE = 7_300

# The lines, raised only with a record in docs/adr/ (16, 17, 21, 23 to 35), and the coverage of
# lines and branches together in per cent, rounded down, which only rises. "." is the root.
PACKAGES = {
    ".": (6_175, 97),
    "adapter": (2_420, 95),
    "api": (7_220, 95),
    "cli": (10_395, 93),
    "content": (2_840, 97),
    "dialect": (1_505, 98),
    "distribution": (2_190, 53),  # most of its tests serve in a child process, see 0016
    "engine": (4_475, 88),
    "exporter": (1_640, 97),
    "family": (1_200, 95),
    "fleet": (4_230, 85),
    "formats": (4_860, 97),
    "http": (1_790, 87),
    "importer": (3_120, 98),
    "layout": (3_050, 96),
    "model": (13_780, 96),
    "node": (3_600, 94),
    "oci": (670, 99),
    "pictures": (960, 94),
    "registry": (3_800, 97),
    "tensor": (1_290, 98),
}
