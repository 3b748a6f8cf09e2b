"""The options that are parameters of pictures, as ``generation`` defines them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal, get_args, get_origin

import click

from clowder_aimage.cli.console.option import options
from clowder_aimage.generation.check import check, parse
from clowder_aimage.generation.parameter import Parameter, list_parameters
from clowder_aimage.generation.seed import read_seed


def parameter_options(*owners: type, without: Collection[str] = ()) -> Callable[[Any], Any]:
    """Return a decorator that adds options for parameters of dataclasses, ``without`` some."""
    selected = [
        parameter
        for owner in owners
        for parameter in list_parameters(owner)
        if parameter.name not in without
    ]
    return options(*map(_build_option, selected))


def _build_option(parameter: Parameter) -> Callable[[Any], Any]:
    name, words = parameter.name, parameter.words
    default = parameter.default_text
    text = f"{words.help} [default: {default}]" if default else words.help
    flag = "-n" if name == "n" else f"--{name.replace('_', '-')}"
    if parameter.type.kind is bool:
        return click.option(flag, name, help=text, is_flag=True, default=None)
    attributes: dict[str, Any] = {
        "metavar": _format_metavar(parameter),
        "shell_complete": _complete(parameter),
    }
    return click.option(flag, name, help=text, type=build_reader(parameter), **attributes)


def build_reader(parameter: Parameter) -> Callable[[Any], Any]:
    """Return a function that reads a value. Its errors have the words of every interface."""

    def read(value: Any) -> Any:
        stated = parse(value, parameter.type) if isinstance(value, str) else value
        if parameter.name == "seed" and (stated := read_seed(stated)) is None:
            return None
        return check(parameter.name, stated, parameter.type)

    return read


def _complete(parameter: Parameter) -> Callable[..., list[str]]:
    choices = _list_choices(parameter)
    return lambda _ctx, _param, incomplete: [
        choice for choice in choices if choice.startswith(incomplete)
    ]


def _format_metavar(parameter: Parameter) -> str:
    if parameter.words.unit:
        return parameter.words.unit.upper()
    if choices := _list_choices(parameter):
        return f"[{'|'.join(choices)}]"
    return {int: "INTEGER", float: "FLOAT"}.get(parameter.type.kind, "TEXT")


def _list_choices(parameter: Parameter) -> tuple[str, ...]:
    return get_args(parameter.type.kind) if get_origin(parameter.type.kind) is Literal else ()
