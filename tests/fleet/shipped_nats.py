"""The shipped configurations of NATS: their users are those of ``fleet/permission.py``.

``python -m tests.fleet.shipped_nats`` writes them.
"""

from __future__ import annotations

from pathlib import Path

from clowder_aimage.fleet.name import GATEWAY, OPERATOR, FleetNames
from clowder_aimage.fleet.permission import (
    ANY_WORKER,
    build_imports,
    build_permissions,
    format_user,
    format_worker_account,
)
from tests.conftest import ROOT

SHIPPED = ROOT / "deploy" / "nats" / "nats-server.conf"
# The workers of each configuration, with the variables of their passwords.
WORKERS = {
    SHIPPED: {"worker-1": "NATS_WORKER_PASSWORD"},
    ROOT / "deploy" / "docker" / "nats-server.conf": {
        "worker-1": "NATS_WORKER_1_PASSWORD",
        "worker-2": "NATS_WORKER_2_PASSWORD",
    },
    ROOT / "deploy" / "kubernetes" / "fleet" / "nats-server.conf": {
        ANY_WORKER: "NATS_WORKER_PASSWORD"
    },
}
_BEGIN = "accounts {\n"


def build_configuration(path: Path) -> str:
    """Return a configuration with the accounts of a fleet and of its workers."""
    head, _, _ = SHIPPED.read_text().partition(_BEGIN)
    workers = [format_shipped_worker(*worker) for worker in WORKERS[path].items()]
    accounts = [line for lines in (format_shipped_account(), *workers) for line in lines]
    return head + _BEGIN + "".join(f"  {line}\n" for line in accounts) + "}\n"


def format_shipped_account(name: str = "aimage", prefix: str = "") -> list[str]:
    """Return the account of a fleet; ``prefix`` begins the names of its users."""
    users = [
        line
        for role in (OPERATOR, GATEWAY)
        for line in format_user(
            [f"user: {prefix}{role}", f"password: $NATS_{role.upper()}_PASSWORD"],
            build_permissions(FleetNames(), role),
        )
    ]
    exports = build_imports(FleetNames()).format_exports()
    lines = ["jetstream: enabled", "users = [", *(f"  {line}" for line in users), "]", *exports]
    return [f"{name} {{", *(f"  {line}" for line in lines), "}"]


def format_shipped_worker(
    worker: str, variable: str = "NATS_WORKER_PASSWORD", account: str = "aimage", prefix: str = ""
) -> list[str]:
    """Return the account of a worker, with its user."""
    user = "worker" if worker == ANY_WORKER else worker
    login = f"user: {prefix}{user}, password: ${variable}"
    return format_worker_account(login, FleetNames(), worker, account)


if __name__ == "__main__":
    for shipped in WORKERS:
        shipped.write_text(build_configuration(shipped))
