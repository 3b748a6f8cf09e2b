"""``aimage login`` and ``aimage logout``."""

from __future__ import annotations

import re
import sys

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import get_settings, login_connection_options, verb
from clowder_aimage.cli.console.output import print_result, remark, wants_value
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference

# The scheme, and the path of the API.
_ADDRESS = re.compile(r"^https?://|/(?:v[12]/?)?$", re.IGNORECASE)


def _parse_host(text: str) -> str:
    """Parse a registry's host by the rules for references, or its address as docker accepts it."""
    host = _ADDRESS.sub("", text)
    registry = Reference.parse(f"{host}/x").registry
    if registry is None:
        raise UsageError(
            f"invalid registry host {text!r}", hint="for example: registry.example.com"
        )
    return registry


def _ask(prompt: str, option: str, *, hide: bool) -> str:
    """Prompt on the terminal. Raises UsageError if there is none."""
    if not sys.stdin.isatty():
        raise UsageError(f"no terminal to ask for the {prompt.lower()}: use {option}")
    return str(click.prompt(prompt, hide_input=hide, err=True))


@examples(
    "aimage login registry.example.com",
    "aimage login registry.example.com -u alice --password-stdin < password.txt",
)
@verb
@click.argument("registry", metavar="HOST")
@click.option("-u", "--username", help="The username.")
@click.option(
    "-p",
    "--password",
    help="The password; other users of this machine can see it, so prefer --password-stdin.",
)
@click.option("--password-stdin", is_flag=True, help="Read the password from stdin.")
@login_connection_options
def login(registry: str, username: str | None, password: str | None, password_stdin: bool) -> None:
    """Check credentials with the registry HOST and store them in docker's file or helper."""
    from clowder_aimage.registry.credential import login as log_in

    host = _parse_host(registry)
    username = username or _ask("Username", "--username", hide=False)
    if password_stdin:
        password = sys.stdin.readline().rstrip("\r\n")
        if not password:
            raise UsageError("the password on stdin is empty")
    password = password or _ask("Password", "--password-stdin", hide=True)
    location = log_in(host, username, password, get_settings().build_client_options())
    remark(f"logged in to {host} as {username}; the credentials are stored in {location}")
    if wants_value():
        print_result({"registry": host, "username": username, "kept": location}, "")


@examples("aimage logout registry.example.com")
@verb
@click.argument("registry", metavar="HOST")
def logout(registry: str) -> None:
    """Remove the credentials of the registry HOST and of its repositories."""
    from clowder_aimage.registry.credential import logout as log_out

    host = _parse_host(registry)
    location = log_out(host, get_settings().build_client_options())
    remark(f"logged out of {host}; the credentials were in {location}")
    if wants_value():
        print_result({"registry": host}, "")
