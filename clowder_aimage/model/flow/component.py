"""The components of a model: checked strictly at once, loaded when they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.model.adaptation import Adaptation
from clowder_aimage.model.backend import Network, mx
from clowder_aimage.model.memory_budget import Module, OffloadedModule
from clowder_aimage.model.weights import ModelWeights, read_object


@dataclass(frozen=True, slots=True)
class NetworkKind:
    """A network of a family: how it is made from a config, and how that is parsed.

    component: the folder of its weights and its ``config.json``.
    """

    component: str
    make: Callable[[Any], Any]
    parse: Callable[[str, Mapping[str, Any]], Any]

    def config(self, store: BlobFiles, aimage: AImage) -> Any:
        """Read its configuration. Raises ModelError."""
        name = f"{self.component}/config.json"
        return self.parse(name, read_object(store, aimage, name))


@dataclass(frozen=True, slots=True, eq=False)
class ModelComponents:
    """The networks of an AImage that are opened; ``keep_quantized`` is as in ``apply``.

    ``skipped`` names the tensors that were left out.
    """

    store: BlobFiles
    aimage: AImage
    dtype: mx.Dtype
    keep_quantized: bool | None = None
    weights: dict[str, ModelWeights] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def open(self, kind: NetworkKind) -> Module:
        """Check headers and shapes of a network against its configuration; no weight is read.

        Raises:
            ModelError: The configuration or the weights are invalid, or do not match.
            FormatError: A blob is invalid.
        """
        component = kind.component
        weights = ModelWeights.open(self.store, self.aimage, component)
        config = kind.parse(f"{component}/config.json", weights.config)
        how: dict[str, Any] = {"dtype": self.dtype, "keep_quantized": self.keep_quantized}
        self.weights[component] = weights

        def load() -> Network:
            network: Network = kind.make(config)
            weights.apply(network, skip=network.skip, **how)
            return network

        unloaded = kind.make(config)  # its arrays are never computed
        size, left_out = weights.check(unloaded, skip=unloaded.skip, **how)
        self.skipped.extend(f"{component}/{name}" for name in left_out)
        adaptation = Adaptation(component, unloaded.sanitize, unloaded.skip, self.dtype)
        return OffloadedModule(config, size, load, adaptation)
