"""The versions of the program and of Python, and the extras."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from clowder_aimage import __version__
from clowder_aimage.cli.console.installation import EXTRAS, install_command, is_installed
from clowder_aimage.cli.doctor.finding import Finding, Level, MachineCheck


@dataclass(frozen=True, slots=True)
class ProgramCheck(MachineCheck):
    """``is_installed`` returns True if Python finds a package."""

    name = "program"
    is_installed: Callable[[str], bool] = is_installed

    def run(self) -> Iterator[Finding]:
        facts = {
            "version": __version__,
            "python": platform.python_version(),
            "system": platform.system(),
            "release": platform.release(),
            "machine": platform.machine(),
        }
        text = "aimage {version}, Python {python}, {system} {release}, {machine}"
        yield Finding(Level.OK, text.format_map(facts), facts=facts)
        installed = [name for name, extra in EXTRAS.items() if self.is_installed(extra.package)]
        missing = [name for name in EXTRAS if name not in installed]
        yield Finding(
            Level.OK,
            f"extras: {', '.join(installed) or 'none'}",
            facts={"installed": installed, "missing": missing},
        )
        for name in missing:
            command, purpose = install_command(name), EXTRAS[name].purpose
            yield Finding(
                Level.OK,
                f"[{name}] is not installed: {purpose}",
                facts={"extra": name, "purpose": purpose, "install": command},
            )
