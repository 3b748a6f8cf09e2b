"""The variables of huggingface_hub, read without it ("Environment variables" in its documentation).

None of them is needed: without them, the hub is asked without a token.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from clowder_aimage.errors import UsageError

HUB = "https://huggingface.co"


def resolve_cache_directory() -> Path:
    """Return the directory of the cache (huggingface_hub, "Environment variables").

    Raises UsageError: this user has no home directory, and the variables name no directory.
    """
    environ = os.environ
    path = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    try:
        return _expand(path or f"{_read_home()}/hub")
    except RuntimeError:
        raise UsageError(
            "this user has no home directory for the cache of the Hugging Face hub",
            hint="name a directory with HF_HOME",
        ) from None


def is_offline() -> bool:
    """Return True if the hub must not be asked."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in {"1", "ON", "YES", "TRUE"}


def read_endpoint() -> str | None:
    """Return the address of a mirror of the hub; None if the hub itself is asked."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def find_token() -> tuple[str, str] | None:
    """Return the token for the hub and its place, a variable or a file; None without one."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := os.environ.get(name, "").strip():
            return token, name
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        path = _expand(os.environ.get("HF_TOKEN_PATH") or f"{_read_home()}/token")
        if token := path.read_text("utf-8").strip():
            return token, str(path)
    return None


def _read_home() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return os.environ.get("HF_HOME") or f"{base}/huggingface"


def _expand(path: str) -> Path:
    """Return a path with its variables and home. Raises RuntimeError: there is no home."""
    return Path(os.path.expandvars(path)).expanduser()
