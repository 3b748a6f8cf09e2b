"""AI models as OCI artifacts: create, push, pull and run them.

The names in ``__all__`` and the exceptions in ``clowder_aimage.errors`` are the public interface,
described in docs/python.md. They are imported on first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clowder_aimage.client.answer import Answer
    from clowder_aimage.client.model import Model, load
    from clowder_aimage.client.picture import Picture
    from clowder_aimage.client.registry import Registry
    from clowder_aimage.client.store import Store
    from clowder_aimage.client.transfer import create, pull, push
    from clowder_aimage.client.worker import Worker
    from clowder_aimage.errors import AImageError
    from clowder_aimage.oci import Reference

__version__ = "0.1.0"
__all__ = [
    "AImageError",
    "Answer",
    "Model",
    "Picture",
    "Reference",
    "Registry",
    "Store",
    "Worker",
    "create",
    "load",
    "pull",
    "push",
]
_MODULES = {
    "AImageError": "errors",
    "Answer": "client.answer",
    "Picture": "client.picture",
    "Reference": "oci",
    "Registry": "client.registry",
    "Store": "client.store",
    "Worker": "client.worker",
    **dict.fromkeys(("Model", "load"), "client.model"),
    **dict.fromkeys(("create", "pull", "push"), "client.transfer"),
}
__all__ = [*_MODULES]


class _Package(ModuleType):
    """This package. Its functions take precedence over the modules of the same names."""

    # The import system sets a submodule as an attribute of its package. That would replace the
    # function of the same name.
    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
