"""The components of a model: checked strictly at once, loaded when they are used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.model.flow.array_library import ArrayLibrary
from clowder_aimage.model.flow.memory_budget import Module
from clowder_aimage.model.model_file import read_object
from clowder_aimage.model.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class ControlKind:
    """A kind of control network: ``make`` as of ``ModelComponents.module``.

    read: return the configuration of the weights, for a transformer's one. Raises ModelError.
    """

    make: Callable[..., Any]
    read: Callable[[ModelWeights, Any], Any]


@dataclass(frozen=True, slots=True)
class NetworkKinds:
    """The networks of a family in one library; each is a ``make`` of ``ModelComponents.module``.

    Only requests with a picture need the ``picture_encoder``.
    """

    text_encoder: Callable[..., Any]
    transformer: Callable[..., Any]
    vae: Callable[..., Any]
    picture_encoder: Callable[..., Any]
    control: ControlKind | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ModelComponents(ABC):
    """The files of a model, and the library that computes its networks."""

    store: BlobFiles
    aimage: AImage
    library: ArrayLibrary

    @abstractmethod
    def build_module(
        self,
        weights: ModelWeights,
        config: Any,
        make: Callable[..., Any],
        *,
        is_adapted: bool = True,
    ) -> Module:
        """Check weights against the network of ``make``, and return it to be loaded on use.

        Headers and shapes are checked; no weight is read. ``is_adapted``: adapters of requests may
        change it.

        Raises:
            ModelError: The weights are invalid, or do not match the configuration.
            FormatError: A blob is invalid.
        """


def read_config(
    store: BlobFiles,
    aimage: AImage,
    file: str,
    parse: Callable[[str, Mapping[str, Any]], Any],
) -> Any:
    """Read and parse a JSON file of a model. Raises ModelError."""
    return parse(file, read_object(store, aimage, file))
