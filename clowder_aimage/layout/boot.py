"""The current start of the operating system.

What a process wrote outlives it in the caches of the system, and is lost with them.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

_LINUX_ID = Path("/proc/sys/kernel/random/boot_id")
_MACOS_ID = b"kern.bootsessionuuid"
# Bytes of a UUID as text, with a zero at the end.
_MAX_SIZE = 64
_ID = re.compile(r"[0-9A-Za-z-]{8,64}")


@functools.cache
def read_boot_id() -> str:
    """Return the ID of this start of the system; "" where the system has none."""
    try:
        text = _read_macos_id() if sys.platform == "darwin" else _LINUX_ID.read_text("ascii")
    except (OSError, ValueError, AttributeError):
        return ""
    text = text.strip()
    return text if _ID.fullmatch(text) else ""


def _read_macos_id() -> str:
    import ctypes

    value, size = ctypes.create_string_buffer(_MAX_SIZE), ctypes.c_size_t(_MAX_SIZE)
    library = ctypes.CDLL(None, use_errno=True)
    if library.sysctlbyname(_MACOS_ID, value, ctypes.byref(size), None, ctypes.c_size_t(0)):
        raise OSError(ctypes.get_errno(), "sysctlbyname")
    return value.value.decode("ascii")
