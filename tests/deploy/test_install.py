"""``make install`` gives a user the program, with an environment of its own and without root."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.written import ROOT
from tests.process import run

pytest.importorskip("hatchling", reason="hatchling is not installed")
Make = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that runs make in a temporary home, without the network.

    The packages of this environment stand for those of an index. The package itself is not among
    them, so it is built from the checkout.
    """
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "clowder" not in entry.name:
            (packages / entry.name).symlink_to(entry)
    environment = {
        "HOME": str(tmp_path / "home"),
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(packages),
        # pip's way of saying --no-build-isolation and --no-compile
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_NO_COMPILE": "0",
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
    }

    def run_make(*words: str, path: str = "") -> subprocess.CompletedProcess[str]:
        command = ["make", "-s", "-C", ROOT, *words, "EXTRAS="]
        return run(command, env=environment | {"PATH": path + environment["PATH"]}, text=True)

    return run_make


@pytest.mark.integration
def test_the_program_is_installed_upgraded_and_removed(make: Make, tmp_path: Path) -> None:
    home = tmp_path / "home"
    link, venv = home / ".local" / "bin" / "aimage", home / ".local" / "share" / "aimage-venv"
    installed = make("install")
    assert installed.returncode == 0, installed.stderr
    assert f"Add {link.parent} to PATH" in installed.stdout
    assert link.resolve() == venv / "bin" / "aimage"
    (stale,) = venv.glob("lib/python*/site-packages/clowder_aimage/push.py")
    stale.unlink()
    upgraded = make("install", path=f"{link.parent}{os.pathsep}")
    assert upgraded.returncode == 0 and stale.exists()
    assert "PATH" not in upgraded.stdout
    hint = "from clowder_aimage.cli.console.installation import *; print(install_command('hf'))"
    advice = run([venv / "bin" / "python", "-c", hint], env={}, cwd=home, text=True).stdout.strip()
    assert advice == f"{venv}/bin/python -m pip install '{ROOT}[hf]'"
    assert make("uninstall").returncode == 0
    assert not link.is_symlink() and not venv.exists()
    assert make("uninstall").returncode == 0


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_program_of_another_origin_stays(make: Make, tmp_path: Path, kind: str) -> None:
    program = tmp_path / "home" / ".local" / "bin" / "aimage"
    program.parent.mkdir(parents=True)
    if kind == "file":
        program.write_text("something else")
    else:
        program.symlink_to(tmp_path / "elsewhere")
    refused = make("install")
    assert refused.returncode == 2
    assert f"{program} was made by another program" in refused.stderr
    assert make("uninstall").returncode == 0
    assert os.path.lexists(program)
    assert not (tmp_path / "home" / ".local" / "share").exists()
