"""The directories of a user who has no home, or one that is closed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.config import user_directory
from clowder_aimage.errors import UsageError
from clowder_aimage.registry import credential_helper


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take HOME, the directories of XDG and the entry in /etc/passwd away."""
    for name in ("HOME", "AIMAGE_STORE", "AIMAGE_CONFIG", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)

    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_has_no_configuration_and_must_name_a_store() -> None:
    assert user_directory.find_config_file() is None
    with pytest.raises(UsageError, match="no home directory for a store"):
        user_directory.list_default_stores()


def test_a_configuration_that_may_not_be_looked_for_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AIMAGE_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def fail(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    warnings: list[str] = []
    monkeypatch.setattr(user_directory, "warn", warnings.append)
    monkeypatch.setattr(Path, "is_file", fail)
    assert user_directory.find_config_file() is None
    assert warnings == [f"{tmp_path}/aimage/config.json is ignored: Permission denied"]


def test_a_signal_during_the_start_of_a_helper_is_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(credential_helper, "_kill", killed.append)
    monkeypatch.setattr(credential_helper, "_running", {7})
    monkeypatch.setattr(credential_helper, "_deferred", [])
    starting: list[Any] = ["docker-credential-x"]
    monkeypatch.setattr(credential_helper, "_starting", starting)
    credential_helper._end_process(signal.SIGINT, None)
    assert killed == [] and credential_helper._deferred == [signal.SIGINT]
    starting.clear()
    with pytest.raises(KeyboardInterrupt):
        credential_helper._end_process(signal.SIGINT, None)
    assert killed == [7]
