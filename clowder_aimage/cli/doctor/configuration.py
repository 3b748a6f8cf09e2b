"""The configuration of this user, and the variables of the environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from clowder_aimage.cli.doctor.finding import Finding, Level, MachineCheck
from clowder_aimage.config.user_directory import (
    check_variables,
    find_config_file,
    find_misspelt_variables,
    is_single_writer,
)
from clowder_aimage.document.schema import read_configuration
from clowder_aimage.errors import UsageError
from clowder_aimage.registry.host_settings import read_settings

_SHOW = "aimage config show"


@dataclass(frozen=True, slots=True)
class ConfigurationCheck(MachineCheck):
    """``find_file`` returns the path of the configuration; None if this user has none."""

    name = "config"
    find_file: Callable[[], Path | None] = find_config_file

    def run(self) -> Iterator[Finding]:
        try:
            yield _judge_file(self.find_file())
            # A variable, else a setting of the file.
            is_single_writer()
        except UsageError as error:
            yield Finding.of_error(error, _SHOW)
        for section in ("worker", "node", "gateway", "registry"):
            try:
                check_variables(section)
            except UsageError as error:
                yield Finding.of_error(error, _SHOW)
        for name, nearest in find_misspelt_variables():
            message = f"unknown environment variable {name}"
            yield Finding(Level.WARNING, message, f"did you mean {nearest}?", {"variable": name})


def _judge_file(path: Path | None) -> Finding:
    """Return the finding of the file. Raises UsageError: it cannot be read, or is not valid."""
    facts = {"file": None if path is None else str(path)}
    if path is None:
        return Finding(Level.OK, "none: this user has no directory for it", facts=facts)
    sections = read_configuration(path, lambda document: sorted(document))
    read_settings(path)
    if not sections:
        return Finding(Level.OK, f"{path} does not exist: the defaults apply", facts=facts)
    return Finding(Level.OK, f"{path}: {', '.join(sections)}", facts=facts | {"keys": sections})
