"""The ability of a model here: from its files, its runtime, and this installation.

Lists show what a model can do with what this installation has, and requests for anything else are
refused before it is loaded. The part that follows from the files is derived once for a digest; the
rest is asked each time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from clowder_aimage.errors import UnrunnableError, UsageError, build_extra_error

# Runtimes: of language models, of encoders of texts, of image models
MLX_LM, LLAMA, ENCODER, PIPELINES = "mlx-lm", "llama.cpp", "the encoder", "pipelines"
_GGUF = "convert it to GGUF, which llama.cpp may run"


@dataclass(frozen=True, slots=True)
class Ability:
    """The part of an ability that the files of a model show.

    capabilities: of which this installation has all or none. runtime: that computes them, empty
    without one. network: the fields of config.json by which mlx-lm chooses its network; none while
    the file cannot be read. fault: the reason why no runtime can, if there is one.
    """

    capabilities: tuple[str, ...] = ()
    runtime: str = ""
    network: dict[str, Any] = field(default_factory=dict)
    fault: str = ""

    def find_obstacle(self) -> UsageError | None:
        """Return the error of a model that cannot run here, None if it can."""
        if self.fault:
            return UsageError(self.fault)
        check = _CHECKS.get(self.runtime)
        return None if check is None else check(self.network)

    def find_fault(self) -> str:
        """Return why no installation of this version runs the model, as far as it is known."""
        is_known = self.runtime == MLX_LM and find_spec("mlx_lm") is not None
        obstacle = _check_mlx_lm(self.network) if is_known else None
        return self.fault or (obstacle.message if obstacle else "")

    def list_capabilities(self) -> tuple[str, ...]:
        """Return the capabilities of the model here."""
        return () if self.find_obstacle() else self.capabilities

    def check(self, name: object) -> None:
        """Raise UnrunnableError if the model cannot run here."""
        obstacle = self.find_obstacle()
        # The process of pictures names what it lacks
        if obstacle and self.runtime != PIPELINES:
            raise UnrunnableError(f"{name} cannot run here: {obstacle}", **obstacle.advice)


def _find_missing(extra: str, *modules: str) -> UsageError | None:
    is_missing = any(find_spec(module) is None for module in modules)
    return build_extra_error("it", extra) if is_missing else None


def _check_pipelines(_: Mapping[str, Any]) -> UsageError | None:
    return None if find_spec("torch") is not None else _find_missing("mlx", "mlx")


def _check_mlx_lm(network: Mapping[str, Any]) -> UsageError | None:
    if missing := _find_missing("text", "mlx_lm"):
        return missing
    if not network:
        return None
    names = importlib.import_module("clowder_aimage.model.mlxlm.network_name")
    obstacle: str = names.find_obstacle(network)
    return UsageError(obstacle, hint=_GGUF) if obstacle else None


_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], UsageError | None]] = {
    PIPELINES: _check_pipelines,
    ENCODER: lambda _: _find_missing("mlx", "mlx", "tokenizers"),
    MLX_LM: _check_mlx_lm,
    LLAMA: lambda _: _find_missing("llama", "xllamacpp"),
}
