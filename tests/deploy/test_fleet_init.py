"""The service ``fleet-init`` of docker-compose.yml, on its configuration of NATS."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from clowder_aimage.fleet.key import ROOT, SIGNER
from clowder_aimage.fleet.key_files import read_public_root_key, read_seed
from tests.conftest import ROOT as REPOSITORY
from tests.deploy.written import DEPLOY, compose
from tests.fleet.fleet_run import Nats
from tests.process import run

pytestmark = pytest.mark.integration
PLACES = ("aimage-fleet", "aimage-gateway", "aimage-worker")


def test_fleet_init_gives_each_container_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in compose()["services"]["nats"]["environment"]:
        monkeypatch.setenv(name, "password")
    conf = (DEPLOY / "docker" / "nats-server.conf").read_text()
    for old, new in (('"/var/lib/nats"', f'"{tmp_path}/js"'), ("listen:", "# listen:")):
        conf = conf.replace(old, new)
    (tmp_path / "nats.conf").write_text(conf)
    script = (DEPLOY / "docker" / "fleet-init.sh").read_text()
    for place in PLACES:
        (tmp_path / place).mkdir()
        script = script.replace(f"/run/{place}", str(tmp_path / place))
    aimage = f"{sys.executable} -m clowder_aimage"
    server = Nats(tmp_path / "server", arguments=("-c", str(tmp_path / "nats.conf"))).start()
    environment = {name: text for name, text in os.environ.items() if "AIMAGE" not in name}
    environment |= {
        "AIMAGE_NATS": server.url.replace("nats://", "nats://operator:password@"),
        "XDG_CONFIG_HOME": str(tmp_path / "aimage-fleet"),
        "HOME": str(tmp_path),
        "PYTHONPATH": str(REPOSITORY),
    }
    try:
        for words in (["fleet", "init"], ["fleet", "init"], ["fleet", "status"]):
            command = ["/bin/sh", "-c", script.replace('aimage "$@"', f'{aimage} "$@"'), "sh"]
            done = run([*command, *words], env=environment, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
    finally:
        server.kill()
    keys = tmp_path / "aimage-fleet" / "aimage" / "fleet" / "aimage"
    found = {place: {p.name for p in (tmp_path / place).iterdir()} for place in PLACES[1:]}
    assert found == {
        "aimage-gateway": {"gateway.seed", "root.public"},
        "aimage-worker": {"root.public"},
    }
    seed = tmp_path / "aimage-gateway" / "gateway.seed"
    assert stat.S_IMODE(seed.stat().st_mode) == 0o600
    assert read_seed(seed, SIGNER).public == read_seed(keys / "gateway.seed", SIGNER).public
    root = read_seed(keys / "root.seed", ROOT).public
    assert read_public_root_key(str(tmp_path / "aimage-worker" / "root.public")) == root
