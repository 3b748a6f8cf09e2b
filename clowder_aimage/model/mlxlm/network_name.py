"""The name of the network of a configuration, by mlx-lm's own tables, without importing it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from clowder_aimage.errors import ModelError

_PACKAGE = "mlx_lm"
_TABLES = ("MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING")


def find_obstacle(config: Mapping[str, Any]) -> str:
    """Return why mlx-lm has no network of a configuration; an empty text if it has one."""
    try:
        name = resolve_model_type(config)
    except ModelError as error:
        return error.message
    return find_missing(name)


def find_missing(name: str) -> str:
    """Return why the module of a network cannot be imported; an empty text if it can."""
    file = _find_directory() / "models" / f"{name}.py"
    text = file.read_text("utf-8") if file.is_file() else ""
    # A module of functions is not a network
    if not ("ModelArgs" in text and "\nclass Model(" in text):
        return f"mlx-lm has no network of the type {name!r:.80}"
    # Without the package that it tries to import, it would print, and end the process
    tried = _list_tried(text) if "\ntry:" in text else ()
    missing = next((package for package in tried if find_spec(package) is None), None)
    return f"the network {name} of mlx-lm needs the package {missing}" if missing else ""


def _list_tried(text: str) -> list[str]:
    """Return the packages that a module tries to import."""
    blocks = [node for node in ast.parse(text).body if isinstance(node, ast.Try)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.Import)]
    return [alias.name.partition(".")[0] for node in imports for alias in node.names]


def resolve_model_type(config: Mapping[str, Any]) -> str:
    """Return the name of the module of a configuration. Raises ModelError."""
    kind, names = config.get("model_type"), config.get("architectures") or ()
    if not isinstance(kind, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", kind):
        raise ModelError(f"config.json: model_type is {kind!r:.80}")
    remapped, special = _read_tables()
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and (kind, name) in special:
            return str(special[kind, name])
    return str(remapped.get(kind, kind))


@functools.cache
def _read_tables() -> tuple[dict[Any, Any], dict[Any, Any]]:
    tables: dict[str, dict[Any, Any]] = {name: {} for name in _TABLES}
    for node in ast.parse((_find_directory() / "utils.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in tables:
                tables[name] = ast.literal_eval(node.value)
    return tables[_TABLES[0]], tables[_TABLES[1]]


def _find_directory() -> Path:
    spec = find_spec(_PACKAGE)
    assert spec is not None and spec.submodule_search_locations  # noqa: S101 - checked before
    return Path(spec.submodule_search_locations[0])
