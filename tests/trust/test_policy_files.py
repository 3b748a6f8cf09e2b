"""Files of a policy that cannot be used refuse everything, and say why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clowder_aimage.config import trust_policy
from clowder_aimage.config.trust_policy import UserFiles, read_policy
from clowder_aimage.errors import UsageError
from tests.trust.place import Place


def read(own: Path | None, *, is_explicit: bool = False) -> object:
    return read_policy(UserFiles(lambda: own, lambda: is_explicit))


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "system.yaml"
    monkeypatch.setattr(trust_policy, "SYSTEM_FILES", [path])
    return path


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "directory"),
        (b"#" * (1 << 20) + b"\n", "more than 1048576 bytes"),
        (b"", "it is empty"),
        (b"- rules", "not an object"),
        (b"\xff", "decode"),
        (b"rules: [", "line"),
    ],
)
def test_a_policy_of_the_machine(system: Path, data: bytes | None, reason: str) -> None:
    if data is None:
        system.mkdir()
    else:
        system.write_bytes(data)
    with pytest.raises(UsageError, match="cannot use the policy") as refused:
        read(None)
    assert reason in refused.value.message


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_policy_of_a_user_that_is_no_object(tmp_path: Path, suffix: str) -> None:
    own = tmp_path / f"config.{suffix}"
    own.write_text('{"trust": "all"}')
    with pytest.raises(UsageError, match="trust is not an object"):
        read(own)
    own.write_text("{}")
    assert read(own) is None
    assert read(None) is None


@pytest.mark.usefixtures("system")
def test_a_named_configuration_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot use the policy"):
        read(tmp_path, is_explicit=True)
    # One at the default path that cannot be read has no policy
    assert read(tmp_path) is None


@pytest.mark.usefixtures("system")
def test_a_configuration_that_mentions_trust_elsewhere(tmp_path: Path) -> None:
    own = tmp_path / "config.json"
    own.write_text('{"registries": {"trust.example.com": {}}}')
    assert read(own) is None


def test_a_link_that_leads_nowhere_is_an_error(system: Path, tmp_path: Path) -> None:
    """A mounted policy is a link to a directory that is replaced."""
    (tmp_path / "current").symlink_to(tmp_path / "absent")
    system.symlink_to(tmp_path / "current" / "trust.yaml")
    with pytest.raises(UsageError, match="cannot use the policy"):
        read(None)


def test_links_in_a_circle_are_an_error(system: Path) -> None:
    system.symlink_to(system)
    with pytest.raises(UsageError, match="cannot use the policy"):
        read(None)


@pytest.mark.parametrize("name", ["config.json", "config.yaml"])
def test_the_policy_of_a_user_is_followed(place: Place, name: str) -> None:
    """By verbs that read the configuration for other settings, too."""
    rule = {"pattern": f"{place.repository}*", "keys": [str(place.public)]}
    path = place.empty.home / "config" / "aimage" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"trust": {"rules": [rule]}, "run": {}}))
    assert f"is refused by rule 1 of {path}" in place.empty("pull", place.name, code=5).err
    place.sign()
    place.empty("pull", place.name, "-q")
    checked = place.empty("trust", "check", place.name, "--json").value
    assert (checked["accepted"], checked["rules"][0]["mode"]) == (True, "enforce")
    place.empty("validate", path)


def test_the_first_gate_of_a_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    gates = ["that of a caller"]
    monkeypatch.setattr(trust_policy, "GATES", gates)
    trust_policy.use_trust_policy(UserFiles(lambda: None, lambda: False), lambda: None)  # type: ignore[arg-type,return-value]
    assert gates == ["that of a caller"]
