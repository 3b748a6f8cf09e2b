"""The components of a model: checked strictly at once, loaded when they are used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.model.flow.array_library import ArrayLibrary
from clowder_aimage.model.flow.memory_budget import Module
from clowder_aimage.model.weights import ModelWeights, read_object


@dataclass(frozen=True, slots=True)
class NetworkKind:
    """A network of a family: how it is made from a config, and how that is parsed.

    component: the folder of its weights and its ``config.json``. make: called as by ``module``.
    """

    component: str
    make: Callable[..., Any]
    parse: Callable[[str, Mapping[str, Any]], Any]

    def config(self, store: BlobFiles, aimage: AImage) -> Any:
        """Read its configuration. Raises ModelError."""
        name = f"{self.component}/config.json"
        return self.parse(name, read_object(store, aimage, name))


@dataclass(frozen=True, slots=True, eq=False)
class ModelComponents(ABC):
    """The networks of an AImage that are opened, for one library.

    ``skipped`` names the tensors that were left out.
    """

    store: BlobFiles
    aimage: AImage
    library: ArrayLibrary
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
        self.weights[component] = weights
        return self.module(weights, config, kind.make)

    @abstractmethod
    def module(
        self,
        weights: ModelWeights,
        config: Any,
        make: Callable[..., Any],
        *,
        is_adapted: bool = True,
    ) -> Module:
        """Check weights against the network that ``make`` returns, and load them when it is used.

        ``is_adapted``: adapters of requests may change it. Raises as ``open``.
        """
