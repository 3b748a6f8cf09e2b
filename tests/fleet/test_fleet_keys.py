"""The keys of a fleet: their files, changes of the key set, and the verbs."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.errors import AImageError
from clowder_aimage.fleet.key import ROOT, SIGNER, FleetKey, KeySet, SignerKey
from clowder_aimage.fleet.key_change import (
    Keys,
    add_key,
    build_key,
    choose_name,
    remove_key,
    rotate_key,
)
from clowder_aimage.fleet.key_files import KeyDirectory, read_public_root_key, read_seed, write_seed
from tests.fleet.fleet_run import Nats
from tests.process import Aimage

A, B, C = (FleetKey.generate(SIGNER).public for _ in range(3))
ROOT_KEY = FleetKey.generate(ROOT)
KEYS = (SignerKey("gateway", "gateway", A), SignerKey("operator", "operator", B))
_numbers = itertools.count()


def names(keys: Keys) -> list[str]:
    return [f"{key.name} {key.role} {'ABC'[[A, B, C].index(key.public)]}" for key in keys]


# -- changes of the key set

CHANGES: dict[str, tuple[Callable[[Keys], Keys], list[str]]] = {
    "added": (
        lambda keys: add_key(keys, build_key("g2", "gateway", C)),
        ["gateway gateway A", "operator operator B", "g2 gateway C"],
    ),
    "removed": (lambda keys: remove_key(keys, "gateway"), ["operator operator B"]),
    "rotated": (
        lambda keys: rotate_key(keys, "gateway", C),
        ["gateway-1 gateway A", "operator operator B", "gateway gateway C"],
    ),
}
REFUSED: dict[str, tuple[Callable[[Keys], object], str]] = {
    "a name twice": (
        lambda keys: add_key(keys, build_key("gateway", "gateway", C)),
        "the name 'gateway'",
    ),
    "a key twice": (lambda keys: add_key(keys, build_key("g2", "gateway", A)), "as 'gateway'"),
    "rotated to a key that is there": (lambda keys: rotate_key(keys, "gateway", B), "'operator'"),
    "no such name": (lambda keys: remove_key(keys, "g2"), "no key with the name 'g2'"),
    "no such name to rotate": (lambda keys: rotate_key(keys, "g2", C), "no key with the name"),
    "a bad name": (lambda _: build_key("g 2", "gateway", C), "letters, digits"),
    "a root key": (lambda _: build_key("g2", "gateway", ROOT_KEY.public), "not a public key"),
    "a seed": (lambda _: build_key("g2", "gateway", ROOT_KEY.seed), "is a seed"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changes_of_a_key_set(case: str) -> None:
    change, expected = CHANGES[case]
    assert names(change(KEYS)) == expected


@pytest.mark.parametrize("case", REFUSED)
def test_a_change_that_makes_no_sense_is_refused(case: str) -> None:
    change, words = REFUSED[case]
    with pytest.raises(AImageError) as raised:
        change(KEYS)
    assert words in f"{raised.value.message} {raised.value.hint}"


def test_a_second_machine_gets_another_name() -> None:
    assert choose_name((), "gateway") == "gateway"
    assert choose_name(KEYS, "gateway") == "gateway-2"
    assert choose_name((*KEYS, SignerKey("gateway-2", "gateway", C)), "gateway") == "gateway-3"


# -- files


def test_a_seed_is_for_its_owner_and_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "gateway.seed"
    key = FleetKey.generate(SIGNER)
    write_seed(path, key)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_seed(path, SIGNER).public == key.public
    with pytest.raises(AImageError, match="never overwritten"):
        write_seed(path, FleetKey.generate(SIGNER))
    assert read_seed(path, SIGNER).public == key.public


def test_a_file_that_is_no_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_seed(path, ROOT_KEY)
    with pytest.raises(AImageError, match=re.escape(str(path))):
        read_seed(path, SIGNER)
    with pytest.raises(AImageError, match="is not a file"):
        read_seed(tmp_path, SIGNER)
    with pytest.raises(AImageError, match="cannot read"):
        read_seed(tmp_path / "none", SIGNER)


def test_a_public_root_key_is_a_text_or_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{ROOT_KEY.public}\n")
    assert read_public_root_key(ROOT_KEY.public) == ROOT_KEY.public
    assert read_public_root_key(str(tmp_path / "key")) == ROOT_KEY.public
    (tmp_path / "seed").write_text(ROOT_KEY.seed)
    changed = ROOT_KEY.public[:-1] + ("B" if ROOT_KEY.public[-1] == "A" else "A")
    texts = (A, changed, ROOT_KEY.seed, "O\0")
    for wrong in (*texts, str(tmp_path / "none"), str(tmp_path / "seed")):
        with pytest.raises(AImageError) as raised:
            read_public_root_key(wrong)
        assert ROOT_KEY.seed not in raised.value.message


def test_the_copy_of_a_key_set_counts_for_its_root_key_only(tmp_path: Path) -> None:
    directory = KeyDirectory(tmp_path)
    key_set = KeySet("f", 5, KEYS)
    directory.write_copy(key_set.encode(ROOT_KEY))
    assert directory.read_copy(ROOT_KEY.public, "f") == key_set
    assert directory.read_copy(FleetKey.generate(ROOT).public, "f") is None
    assert directory.read_copy(ROOT_KEY.public, "g") is None


# -- the verbs


class Office:
    """A machine of an administrator, and a fleet of its own."""

    def __init__(self, nats: Nats, home: Path) -> None:
        self.here, self.url = Aimage(home, home / "store"), nats.url
        self.fleet = f"keys{next(_numbers)}"
        self.directory = home / "config" / "aimage" / "fleet" / self.fleet

    def __call__(self, *words: object, code: int = 0) -> str:
        access = () if words[0] == "user" else ("--nats", self.url)
        done = self.here("fleet", *words, "--fleet", self.fleet, *access, code=code)
        seeds = [path.read_text().strip() for path in self.here.home.rglob("*.seed")]
        assert not any(seed in done.out + done.err for seed in seeds), "a seed was printed"
        return done.err if code else done.out

    def init(self, *words: object, code: int = 0) -> str:
        return self("init", "--max-bytes", "64MiB", *words, code=code)

    def list_keys(self) -> dict[str, str]:
        return {key["name"]: key["public"] for key in self.read()["keys"]}

    def read(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self("key", "list", "--json"))
        return value


@pytest.fixture
def office(nats: Nats, tmp_path: Path) -> Office:
    return Office(nats, tmp_path)


@pytest.mark.integration
def test_init_makes_the_keys_once(office: Office) -> None:
    said = office.init()
    root = read_seed(office.directory / "root.seed", ROOT)
    assert root.public in said and f"made {office.fleet}-jobs" in said
    assert (office.directory / "root.public").read_text().strip() == root.public
    keys = {
        role: read_seed(office.directory / f"{role}.seed", SIGNER).public
        for role in ("operator", "gateway")
    }
    before = office.read()
    assert office.list_keys() == keys
    assert root.public in office.init()
    assert office.read() == before


@pytest.mark.integration
def test_keys_are_added_rotated_and_removed(office: Office, tmp_path: Path) -> None:
    office.init()
    first = office.list_keys()
    version = office.read()["version"]
    office("key", "add", "g2", "--role", "gateway", "--output", tmp_path / "g2.seed")
    assert office.list_keys()["g2"] == read_seed(tmp_path / "g2.seed", SIGNER).public
    office("key", "add", "ci", "--role", "operator", "--public", C)
    office("key", "rotate", "gateway", "--output", tmp_path / "new.seed")
    keys = office.list_keys()
    assert keys["ci"] == C and keys["gateway-1"] == first["gateway"]
    assert keys["gateway"] == read_seed(tmp_path / "new.seed", SIGNER).public
    office("key", "remove", "gateway-1")
    assert set(office.list_keys()) == {"operator", "g2", "ci", "gateway"}
    assert office.read()["version"] >= version + 4
    # A removed key stays removed
    office.init()
    assert "gateway-1" not in office.list_keys()
    assert "either --output or --public" in office("key", "add", "x", "--role", "gateway", code=2)
    output = ("--output", tmp_path / "new.seed")
    assert "never overwritten" in office("key", "rotate", "g2", *output, code=2)
    assert office.list_keys()["g2"] == read_seed(tmp_path / "g2.seed", SIGNER).public
    assert "no key with the name" in office("key", "remove", "x", code=3)


@pytest.mark.integration
def test_a_key_set_of_another_root_key_is_not_replaced_by_chance(
    office: Office, nats: Nats, tmp_path: Path
) -> None:
    office.init()
    keys = office.list_keys()
    stranger = Office(nats, tmp_path / "stranger")
    stranger.fleet = office.fleet
    (tmp_path / "stranger").mkdir()
    # Without a root key it changes streams only
    assert "on another machine" in stranger.init()
    stranger.directory = tmp_path / "stranger" / "config" / "aimage" / "fleet" / office.fleet
    assert not stranger.directory.exists()
    stranger.init("--keys-only")
    assert "another root key" in stranger.init(code=2)
    change = ("key", "add", "g2", "--role", "gateway", "--public", C)
    assert "another root key" in stranger(*change, code=2)
    assert office.list_keys() == keys
    stranger.init("--replace-keys")
    assert "not signed" in office("key", "list", code=5)
    assert set(stranger.list_keys()) == {"operator", "gateway"}


@pytest.mark.integration
def test_a_server_that_lost_its_data_gets_the_key_set_again(
    office: Office, nats: Nats, tmp_path: Path
) -> None:
    office.init()
    office("key", "add", "g2", "--role", "gateway", "--public", C)
    before = office.read()
    other = Nats(tmp_path / "other").start()
    try:
        office.url = other.url
        assert "aimage fleet init" in office("key", "list", code=2)
        office.init()
        after = office.read()
    finally:
        other.kill()
    assert after["keys"] == before["keys"] and after["version"] > before["version"]


@pytest.mark.integration
def test_the_root_key_may_be_elsewhere(office: Office, tmp_path: Path) -> None:
    elsewhere = ("--root-key", tmp_path / "stick" / "root.seed")
    office.init(*elsewhere)
    assert not (office.directory / "root.seed").exists()
    change = ("key", "add", "g2", "--role", "gateway", "--public", C)
    assert "no root key" in office(*change, code=2)
    office(*change, *elsewhere)
    assert office.list_keys()["g2"] == C


def test_verbs_without_keys_say_what_to_do(tmp_path: Path) -> None:
    here = Aimage(tmp_path, tmp_path / "store")
    nats = ("--nats", "nats://127.0.0.1:1")
    for words in (
        ("serve", "--join", "nats://127.0.0.1:1", "--addr", "127.0.0.1:0"),
        ("gateway", *nats),
        ("fleet", "drain", "w1", *nats),
        ("fleet", "key", "list", *nats),
    ):
        assert "--fleet-key" in here(*words, code=2).err
    known = ("--fleet-key", ROOT_KEY.public)
    assert "--signing-key" in here("gateway", *nats, *known, code=2).err
    assert "--root-key" in here("fleet", "key", "remove", "x", *nats, code=2).err
    wrong = here("gateway", *nats, "--fleet-key", A, code=2).err
    assert "neither a public root key" in wrong
    named = here("serve", "--join", "x", *known, "--worker-name", "gateway", code=2).err
    assert "may not be named 'gateway'" in named


def test_a_user_of_nats_is_printed(tmp_path: Path) -> None:
    here = Aimage(tmp_path, tmp_path / "store")
    said = here("fleet", "user", "gpu-3", "--output", tmp_path / "gpu-3.nk", "--fleet", "team").out
    key = read_seed(tmp_path / "gpu-3.nk", SIGNER)
    assert f"nkey: {key.public}" in said and key.seed not in said
    assert said.startswith("aimage-team-gpu-3 {") and '"team.log.gpu-3.*"' in said
    gateway = here("fleet", "user", "g", "--role", "gateway", "--public", C, "--json").value
    assert (gateway["nkey"], gateway["role"]) == (C, "gateway")
    assert '"aimage.job.>"' in " ".join(gateway["lines"])
    any_name = here("fleet", "user", "*", "--public", C, "--account", "other").out
    assert any_name.startswith("other-aimage-workers {") and '"aimage.log.*.*"' in any_name
    for name in ("gateway", "a.b", "a>", ""):
        assert "name of a worker" in here("fleet", "user", name, "--public", C, code=2).err


@pytest.mark.integration
def test_results_are_kept_as_long_as_a_signed_job_could_be_stored_again(office: Office) -> None:
    assert "2 minutes at least" in office("init", "--keep", "119s", code=2)
