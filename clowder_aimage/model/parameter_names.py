"""The tensors of a component and the parameters of its network, matched one to one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from clowder_aimage.errors import ModelError
from clowder_aimage.model.stored_tensor import format_names
from clowder_aimage.tensor.wrapper_name import strip_wrappers

# Types of weights that are values
FLOATS = ("F32", "F16", "BF16")


def match_tensors(
    component: str,
    sanitize: Callable[[str], str],
    parameters: Collection[str],
    names: Iterable[str],
) -> dict[str, str]:
    """Map the names of all tensors to those of the ``parameters`` parameters, one to one.

    ``sanitize`` returns the name of the parameter of a tensor.

    Raises:
        ModelError: A tensor is missing, unexpected, or duplicated.
    """
    matches, component = {name: sanitize(name) for name in names}, component or "the model"
    wrapped = sorted(name for name in matches if name != strip_wrappers(name))
    # A network may know the words of wrappers
    if wrapped and {*matches.values()} != {*parameters}:
        raise ModelError(
            f"{component}: a wrapper has changed the names of tensors: {format_names(wrapped)}",
            hint="save the network itself, without torch.compile, FSDP or another wrapper",
        )
    counts = Counter(matches.values())
    if twice := sorted(parameter for parameter, count in counts.items() if count > 1):
        raise ModelError(f"{component}: duplicate tensors for {format_names(twice)}")
    if missing := sorted(set(parameters) - set(counts)):
        raise ModelError(f"{component}: missing tensors {format_names(missing)}")
    if extra := sorted(name for name, parameter in matches.items() if parameter not in parameters):
        raise ModelError(
            f"{component}: unexpected tensors {format_names(extra)}",
            hint="the weights do not match the configuration",
        )
    return matches


def check_shape(
    component: str, name: str, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Check the shape of the tensor ``name`` against its parameter. Raises ModelError."""
    if expected != shape:
        path = f"{component}/{name}" if component else name
        raise ModelError(
            f"{path}: the configuration requires shape {list(expected)}, "
            f"the tensor has {list(shape)}"
        )
