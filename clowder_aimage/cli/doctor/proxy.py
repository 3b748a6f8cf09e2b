"""The proxies of the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from clowder_aimage.cli.doctor.finding import Finding, Level, MachineCheck
from clowder_aimage.errors import UsageError
from clowder_aimage.registry.proxy import describe_proxy, find_proxy

# A host that no exception names.
_HOST = "registry.example.com"


@dataclass(frozen=True, slots=True)
class ProxyCheck(MachineCheck):
    """``environment`` has the variables; None for those of this process."""

    name = "proxy"
    environment: Mapping[str, str] | None = None

    def run(self) -> Iterator[Finding]:
        environment = os.environ if self.environment is None else self.environment
        proxies = {}
        for scheme in ("https", "http"):
            try:
                proxies[scheme] = describe_proxy(find_proxy(f"{scheme}://{_HOST}", environment))
            except UsageError as error:
                yield Finding.of_error(error)
                return
        used = [f"{scheme} by {proxy}" for scheme, proxy in proxies.items() if proxy]
        message = ", ".join(used) or "none"
        exceptions = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
        if used and exceptions:
            message += f"; directly: {exceptions}"
        yield Finding(Level.OK, message, facts=proxies | {"exceptions": exceptions})
