"""The command that installs an extra, for each way in which the program was installed."""

from __future__ import annotations

import importlib.util
import json
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Collection
from importlib import metadata
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import pytest

from clowder_aimage.cli.console import installation
from clowder_aimage.cli.console.installation import install_command
from tests.process import Aimage

GIT = {"url": "https://git.example.com/aimage.git", "vcs_info": {"vcs": "git", "commit_id": "0"}}
WHEEL = {"url": "file:///tmp/clowder_aimage-0.1.0-py3-none-any.whl", "archive_info": {}}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that simulates an environment with pip and an origin of the package."""

    def install(origin: dict[str, Any] | None, *files: str) -> Path:
        text = None if origin is None else json.dumps(origin)

        class _Package(metadata.PathDistribution):
            def read_text(self, filename: str | PathLike[str]) -> str | None:
                return text

        (tmp_path / "bin").mkdir(exist_ok=True)
        for name in ("bin/python", "bin/pip", *files):
            (tmp_path / name).touch(mode=0o755)
        monkeypatch.setattr(metadata, "distribution", lambda _: _Package(tmp_path))
        monkeypatch.setattr(sys, "prefix", str(tmp_path))
        monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        monkeypatch.setattr(metadata, "distributions", lambda **_: [_Package(tmp_path)])
        there = {"aiohttp"}
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: name if name in there else None
        )
        return tmp_path

    return install


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'clowder-aimage[mlx]'"),
        ({"url": "file:///a%20b", "dir_info": {}}, "pip install '/a b[mlx]'"),
        ({"url": "file:///a", "dir_info": {"editable": True}}, "pip install -e '/a[mlx]'"),
        (GIT, f"pip install 'clowder-aimage[mlx] @ git+{GIT['url']}'"),
        (WHEEL, f"pip install 'clowder-aimage[mlx] @ {WHEEL['url']}'"),
    ],
)
def test_an_extra_is_installed_from_where_the_package_came(
    installed: Callable[..., Path], origin: dict[str, Collection[str]] | None, command: str
) -> None:
    installed(origin)
    assert install_command("mlx") == command


def test_a_revision_of_a_repository_stays(installed: Callable[..., Path]) -> None:
    installed(GIT | {"vcs_info": {"vcs": "git", "requested_revision": "v1"}})
    assert install_command("mlx").endswith("aimage.git@v1'")


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("uv-receipt.toml", "uv tool install"),
        ("pipx_metadata.json", "pipx install --force"),
    ],
)
def test_a_tool_installs_anew_with_the_extras_that_are_there(
    installed: Callable[..., Path], file: str, command: str
) -> None:
    installed({"url": "file:///a", "dir_info": {}}, file)
    assert install_command("mlx,worker") == f"{command} '/a[mlx,server,worker]'"


@pytest.mark.parametrize("is_venv", [False, True])
def test_a_python_that_refuses_packages_gets_none(
    installed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, is_venv: bool
) -> None:
    directory = installed({"url": "file:///a", "dir_info": {}}, "EXTERNALLY-MANAGED")
    monkeypatch.setattr(sys, "base_prefix", "/usr" if is_venv else str(directory))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(directory))
    command = "pip install '/a[mlx]'" if is_venv else "pipx install --force '/a[mlx,server]'"
    assert install_command("mlx") == command


def test_every_extra_of_all_is_known() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    (everything,) = project["optional-dependencies"]["all"]
    assert (
        everything == f"clowder-aimage[{','.join(sorted(installation.EXTRAS.keys() - {'torch'}))}]"
    )


def test_another_pip_on_the_path_is_not_used(
    installed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = installed(None)
    monkeypatch.setenv("PATH", "")
    assert install_command("mlx").startswith(f"{directory}/bin/python -m pip install ")
    monkeypatch.setattr(metadata, "distributions", lambda **_: [])
    assert install_command("mlx").startswith(f"uv pip install --python {directory}/bin/python ")


def test_a_checkout_that_is_not_installed_is_named(
    installed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(None)

    def missing(name: str) -> NoReturn:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    root = Path(__file__).parents[2]
    assert install_command("mlx") == f"pip install '{root}[mlx]'"


def test_a_missing_extra_is_named_with_the_command(
    aimage: Callable[..., Aimage], tmp_path: Path
) -> None:
    here = aimage()
    blocked = dict.fromkeys(("structlog", "pydantic"))
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules.update({blocked})")
    here.environment["PYTHONPATH"] = f"{tmp_path}:{here.env().get('PYTHONPATH', '')}"
    message, hint = here("serve", code=2).err.splitlines()
    assert message == "aimage: a worker needs the extra [worker]"
    assert "install" in hint and "[mlx,worker]" in hint
