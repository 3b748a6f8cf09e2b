"""Tests that fail by chance. They are run apart, and their failures do not fail a run.

An entry is a debt: it names the test and the reason why it is not repaired yet. Keep it empty.
"""

from __future__ import annotations

# Node id without parameters: reason
QUARANTINE: dict[str, str] = {}
