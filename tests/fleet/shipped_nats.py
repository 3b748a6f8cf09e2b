"""The shipped configurations of NATS: their users are those of ``fleet/permission.py``.

``python -m tests.fleet.shipped_nats`` writes them.
"""

from __future__ import annotations

from pathlib import Path

from clowder_aimage.fleet.key import GATEWAY, OPERATOR
from clowder_aimage.fleet.name import FleetNames
from clowder_aimage.fleet.permission import (
    ANY_WORKER,
    WORKER,
    build_permissions,
    format_user,
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
_BEGIN, _END = "    users = [\n", "\n    ]\n"


def build_configuration(path: Path) -> str:
    """Return a configuration with the users of its workers, an operator and gateways."""
    head, _, rest = SHIPPED.read_text().partition(_BEGIN)
    tail = rest[rest.index(_END) :]
    users = [
        (OPERATOR, "", "NATS_OPERATOR_PASSWORD"),
        (GATEWAY, "", "NATS_GATEWAY_PASSWORD"),
        *((WORKER, worker, variable) for worker, variable in WORKERS[path].items()),
    ]
    lines = [line for user in users for line in _format_user(*user)]
    return head + _BEGIN + "\n".join(f"      {line}" for line in lines) + tail


def _format_user(role: str, worker: str, variable: str) -> list[str]:
    name = worker if worker not in ("", ANY_WORKER) else role
    login = [f"user: {name}", f"password: ${variable}"]
    return format_user(login, build_permissions(FleetNames(), role, worker or ANY_WORKER))


if __name__ == "__main__":
    for shipped in WORKERS:
        shipped.write_text(build_configuration(shipped))
