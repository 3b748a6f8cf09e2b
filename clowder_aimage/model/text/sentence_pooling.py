"""The pooling of a network's states to an embedding, in numpy and float32.

Reference: sentence-transformers, ``sentence_transformer/modules/pooling.py`` and
``base/modules/dense.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import ModelError
from clowder_aimage.model.text.embedding_recipe import (
    CLS,
    LAST,
    MAX,
    MEAN,
    ROOT,
    WEIGHTED,
    DenseLayer,
    EmbeddingRecipe,
)
from clowder_aimage.model.weights import ModelWeights

Floats = npt.NDArray[np.float32]
# The least length by which a vector is divided
_LEAST = 1e-12


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A layer after the pooling with its weights; residual: None without a matrix of its own."""

    layer: DenseLayer
    weight: Floats
    bias: Floats | None
    residual: Floats | None

    @classmethod
    def load(cls, files: BlobFiles, aimage: AImage, layer: DenseLayer) -> Self:
        """Read the weights in the folder of a layer. Raises ModelError, FormatError."""
        weights = ModelWeights.open(files, aimage, layer.folder)
        shape = (layer.outputs, layer.inputs)
        expected: dict[str, tuple[int, ...]] = {"linear.weight": shape}
        expected |= {"linear.bias": shape[:1]} if layer.has_bias else {}
        has_matrix = layer.is_residual and layer.inputs != layer.outputs
        expected |= {"residual.weight": shape} if has_matrix else {}
        if (stored := weights.get_shapes()) != expected:
            message = f"the configuration requires {expected}, the file has {stored!s:.300}"
            raise ModelError(f"{layer.folder}: {message}")
        values = {name: np.asarray(weights.read_numpy(name), np.float32) for name in expected}
        return cls(
            layer, values["linear.weight"], values.get("linear.bias"), values.get("residual.weight")
        )

    def apply(self, x: Floats) -> Floats:
        """Return the output for x: (inputs,). Raises ModelError: x has another width."""
        if len(x) != self.layer.inputs:
            folder, inputs = self.layer.folder, self.layer.inputs
            raise ModelError(
                f"{folder}: in_features is {inputs}, the vectors have {len(x)} numbers"
            )
        if self.layer.is_unit:
            x = x / max(float(np.linalg.norm(x)), _LEAST)
        result = self.weight @ x
        result = result if self.bias is None else result + self.bias
        result = _ACTIVATIONS[self.layer.activation](result)
        if self.layer.is_residual:
            result = result + (x if self.residual is None else self.residual @ x)
        return result


@dataclass(frozen=True, slots=True)
class SentencePooling:
    """The steps from the states of a text to its embedding."""

    recipe: EmbeddingRecipe
    dense: tuple[DenseModule, ...] = ()

    @classmethod
    def load(cls, files: BlobFiles, aimage: AImage, recipe: EmbeddingRecipe) -> Self:
        """Read the weights of a recipe. Raises ModelError, FormatError."""
        return cls(recipe, tuple(DenseModule.load(files, aimage, it) for it in recipe.dense))

    def pool(self, states: Floats, skipped: int = 0) -> tuple[float, ...]:
        """Return the embedding, of unit length, of states: (tokens, width).

        skipped: tokens of a prompt at the beginning, which the pooling leaves out.
        """
        vector = np.concatenate([_pool(mode, states, skipped) for mode in self.recipe.modes])
        for module in self.dense:
            vector = module.apply(vector)
        vector = vector[: self.recipe.dimensions].astype(np.float64)
        length = math.sqrt(float(vector @ vector))
        if not math.isfinite(length):
            raise ModelError("the model computed an embedding with values that are not finite")
        return tuple((vector / max(length, _LEAST)).tolist())


def _pool(mode: str, states: Floats, skipped: int) -> Floats:
    # Texts that are cut within the prompt have no other tokens
    visible = states[skipped:] if skipped < len(states) else states
    if mode == WEIGHTED:
        weights = np.arange(len(states) - len(visible) + 1, len(states) + 1, dtype=np.float32)
        weighted: Floats = weights @ visible / weights.sum()
        return weighted
    return _POOLED[mode](visible)


_POOLED: dict[str, Callable[[Floats], Floats]] = {
    CLS: lambda states: states[0],
    LAST: lambda states: states[-1],
    MAX: lambda states: states.max(axis=0),
    MEAN: lambda states: states.mean(axis=0),
    ROOT: lambda states: states.sum(axis=0) / np.float32(math.sqrt(len(states))),
}


def _gelu(x: Floats) -> Floats:
    return np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()], np.float32)


def _sigmoid(x: Floats) -> Floats:
    result: Floats = 0.5 * (1 + np.tanh(0.5 * x))
    return result


_ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": _gelu,
    "SiLU": lambda x: x * _sigmoid(x),
    "Sigmoid": _sigmoid,
}
