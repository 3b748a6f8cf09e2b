"""The library mlx-lm, of which only networks, caches and samplers are used.

The package's own initialisation, and its module ``utils``, import transformers and the hub's client
(3 seconds, 200 MB) and lower this process's limit of open files. So the package is entered without
its initialisation, and the tables of ``utils`` are read from its source (``network_name``).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from clowder_aimage.errors import ModelError, build_extra_error
from clowder_aimage.formats.transformers import build_facts
from clowder_aimage.model import backend  # MLX, with a fast BLAS
from clowder_aimage.model.mlxlm.network_config import (
    divide_heads,
    find_kind,
    find_window,
    get_text_config,
    translate_config,
)
from clowder_aimage.model.mlxlm.network_name import find_missing, resolve_model_type
from clowder_aimage.model.mlxlm.network_rope import NetworkRope

_PACKAGE = "mlx_lm"
_MAX_COUNT = 4096  # layers, blocks, experts
_COUNTS = re.compile(r"layers?$|^n_layer|blocks?$|experts$")


def enter() -> None:
    """Make the modules of mlx-lm importable. Raises UsageError without the extra [text]."""
    if _PACKAGE in sys.modules:
        return
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None:
        raise build_extra_error("mlx-lm", "text")
    sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
    if not backend.is_on_gpu():
        # On a CPU MLX compiles with a C++ compiler, for seconds, and writes to /tmp
        backend.mx.disable_compile()


def import_library_module(name: str) -> ModuleType:
    """Import a module of mlx-lm. Raises UsageError without it, ImportError."""
    enter()
    return importlib.import_module(f"{_PACKAGE}.{name}")


@dataclass(frozen=True, slots=True)
class BuiltNetwork:
    """A network whose parameters are not computed yet.

    limit: the most tokens of a text that it computes as its configuration says, or None.
    warnings: what its users should know.
    """

    network: Any
    limit: int | None
    warnings: tuple[str, ...]


def make_network(config: Mapping[str, Any], context: int | None = None) -> BuiltNetwork:
    """Return the network of ``config.json``, for texts of the requested ``context``.

    The model's own code is never run.

    Raises:
        ModelError: The model type is unknown, or the configuration is invalid.
    """
    _check_counts(config)
    kind = resolve_model_type(config)
    network, arguments = _import_network(kind)
    parameters = inspect.signature(arguments).parameters
    translated = translate_config(config, parameters)
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and (name not in translated or (translated[name] is None and _is_value(parameter)))
    ]
    if missing:
        raise ModelError(
            f"config.json lacks {', '.join(missing)[:300]}, which the network of {kind} needs"
        )
    _check_head(translated, parameters)
    try:
        built = network(arguments.from_dict(translated))
        limits = [NetworkRope(translated, context).apply(built), find_window(translated)]
    except ModelError:
        raise
    # The networks do not check their arguments, which may have any type
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"config.json does not fit {kind}: {reason[:300]}") from None
    limit = min((limit for limit in limits if limit is not None), default=None)
    return BuiltNetwork(built, limit, tuple(_list_warnings(translated, limit)))


def _check_head(config: Mapping[str, Any], parameters: Collection[str]) -> None:
    """Refuse heads of another width for a network that divides its own by their number."""
    kind, head, usual = find_kind(config), config.get("head_dim"), divide_heads(config)
    if kind is None or kind.has_scaling or head in (None, usual):
        return
    if not {"head_dim", "text_config"} & {*parameters}:
        raise ModelError(
            f"config.json: head_dim = {head!r:.80} is not supported: the network computes {usual}"
        )


def _is_value(parameter: inspect.Parameter) -> bool:
    """Return True for a parameter that may not be None."""
    return parameter.annotation in (bool, int, float, str)


def _list_warnings(config: Mapping[str, Any], limit: int | None) -> Iterator[str]:
    if find_kind(config) is None:
        name = get_text_config(config).get("model_type")
        yield f"the network {name} is not tested: its texts may differ from those of transformers"
    if limit is not None and limit < (build_facts(config).get("context") or 0):
        yield f"the context is limited to {limit} tokens: mlx-lm computes longer texts otherwise"


def _import_network(kind: str) -> tuple[Any, Any]:
    """Return the classes of a network and of its arguments. Raises ModelError."""
    if reason := find_missing(kind):
        raise ModelError(reason)
    try:
        module = import_library_module(f"models.{kind}")
        return module.Model, module.ModelArgs
    except (ImportError, AttributeError):
        raise ModelError(f"mlx-lm has no network of the type {kind!r:.80}") from None


def _check_counts(config: Mapping[str, Any]) -> None:
    """Refuse numbers of layers that would take minutes to construct."""
    for key, value in config.items():
        if isinstance(value, dict):
            _check_counts(value)
        elif type(value) is int and _COUNTS.search(key) and abs(value) > _MAX_COUNT:
            raise ModelError(f"config.json: {key[:80]} must be at most {_MAX_COUNT}")


def describe() -> str:
    """Return the device and the library in words."""
    return f"{backend.describe()}, mlx-lm"
