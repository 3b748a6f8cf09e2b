"""The directories of a user who has no home, or one that is closed."""

from __future__ import annotations

import json
import signal
import sys
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


@pytest.mark.parametrize(
    ("platform", "store", "state"),
    [
        ("linux", "data/aimage", "state/aimage"),
        (
            "darwin",
            "home/Library/Application Support/aimage",
            "home/Library/Application Support/aimage-state",
        ),
    ],
)
def test_the_directories_are_those_of_the_platform(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str, store: str, state: str
) -> None:
    monkeypatch.delenv("AIMAGE_STORE", raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    for name in ("HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        part = name.removesuffix("_HOME").removeprefix("XDG_").lower()
        monkeypatch.setenv(name, str(tmp_path / part))
    assert user_directory.list_default_stores() == (tmp_path / store,)
    assert user_directory.resolve_history_file() == tmp_path / state / "prompts"
    fleet = tmp_path / "config/aimage/fleet/own"
    assert user_directory.resolve_fleet_directory("own") == fleet
    # A relative path is ignored, as XDG requires.
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")
    fleet = tmp_path / "home/.config/aimage/fleet/own"
    assert user_directory.resolve_fleet_directory("own") == fleet


@pytest.mark.parametrize(
    ("text", "expected"), [("true", True), ("FALSE", False), ("1", True), ("0", False)]
)
def test_a_single_writer_is_stated_by_a_variable(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: bool
) -> None:
    monkeypatch.setenv(user_directory.SINGLE_WRITER, text)
    assert user_directory.is_single_writer() is expected


def test_a_variable_that_is_neither_true_nor_false_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(user_directory.SINGLE_WRITER, "maybe")
    with pytest.raises(UsageError, match=f"invalid {user_directory.SINGLE_WRITER}: 'maybe'"):
        user_directory.is_single_writer()


@pytest.mark.parametrize("is_single", [True, False])
def test_a_single_writer_is_stated_by_the_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_single: bool
) -> None:
    monkeypatch.delenv(user_directory.SINGLE_WRITER, raising=False)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"store": {"single_writer": is_single}}))
    monkeypatch.setenv("AIMAGE_CONFIG", str(path))
    assert user_directory.is_single_writer() is is_single


def test_the_first_directory_of_certificates_that_exists_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed, missing = tmp_path / "closed", tmp_path / "missing"
    is_dir = Path.is_dir

    def look(path: Path) -> bool:
        if path == closed:
            raise PermissionError(13, "Permission denied")
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", look)
    monkeypatch.setenv("SSL_CERT_DIR", f"{closed}:{missing}:{tmp_path}:/")
    assert user_directory._find_certificate_directory() == tmp_path
    monkeypatch.setenv("SSL_CERT_DIR", f"{closed}:{missing}")
    assert user_directory._find_certificate_directory() is None


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
