"""Signed pictures, as C2PA's own reader sees them, and keys that cannot sign."""

from __future__ import annotations

import configparser
import http.server
import io
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("c2pa", reason="c2pa is not installed")

from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from PIL import Image

from clowder_aimage.errors import ModelError, NetworkError, UsageError
from clowder_aimage.model.picture import encode_picture, read_picture
from clowder_aimage.model.picture_mark import COMPOSITE, GENERATED, PictureMark
from clowder_aimage.pictures.provenance import signer as signer_module
from clowder_aimage.pictures.provenance.claim import GENERATION, restore_facts
from clowder_aimage.pictures.provenance.marked_input import MarkedInput
from clowder_aimage.pictures.provenance.marking import read_mark
from clowder_aimage.pictures.provenance.signer import PictureSigner
from clowder_aimage.pictures.provenance.signing_settings import SigningSettings, parse_signing
from tests.process import run
from tests.program import find_program
from tests.provenance.signing import (
    FACTS,
    MARK,
    PIXELS,
    Authority,
    authority,
    get_active,
    get_assertion,
    get_store,
    make_file,
    open_signer,
    read_own,
    with_stores,
    write_key,
)
from tests.wait import until

KINDS = ["png", "jpeg", "webp"]


@pytest.mark.parametrize("kind", KINDS)
def test_c2pas_reader_validates_a_signed_file_and_not_a_changed_one(
    kind: str, tmp_path: Path
) -> None:
    plain = make_file(kind)
    signed = open_signer(tmp_path).sign(plain, kind, MARK, (), FACTS)
    found = read_own(signed, kind, authority().pem)
    assert found["validation_state"] == "Trusted"
    active = get_active(found)
    assert not [one for one in active["assertions"] if "thumbnail" in one["label"]]
    (action,) = get_assertion(active, "c2pa.actions.v2")["actions"]
    assert (action["action"], action["digitalSourceType"]) == ("c2pa.created", GENERATED)
    assert action["softwareAgent"]["name"] == "aimage"
    assert restore_facts(get_assertion(active, GENERATION)) == FACTS
    # The rest of the file is as it was
    before, after = read_picture(plain, "it"), read_picture(signed, "it")
    assert (before.pixels == after.pixels).all() and before.metadata == after.metadata
    assert read_mark(signed, "it") == MARK
    assert len(signed) - len(plain) < 6000

    changed = bytearray(signed)
    changed[len(signed) - 40] ^= 1  # within the pixels
    assert read_own(bytes(changed), kind)["validation_state"] == "Invalid"


def test_one_changed_pixel_makes_a_signature_invalid(tmp_path: Path) -> None:
    signed = open_signer(tmp_path).sign(make_file(), "png", MARK, (), FACTS)
    pixels = PIXELS.copy()
    pixels[3, 5, 1] += 1
    changed = with_stores(encode_picture(pixels, FACTS, mark=MARK), get_store(signed))
    found = read_own(changed, "png")
    codes = [one["code"] for one in found["validation_results"]["activeManifest"]["failure"]]
    assert codes == ["assertion.dataHash.mismatch"]


def test_a_file_without_its_manifest_keeps_its_mark(tmp_path: Path) -> None:
    signed = open_signer(tmp_path).sign(make_file(), "png", MARK, (), FACTS)
    assert get_store(signed)
    stripped = with_stores(signed)
    assert (get_store(stripped), read_mark(stripped, "it")) == (b"", MARK)


def test_what_is_not_stated_in_the_file_is_not_signed(tmp_path: Path) -> None:
    signed = open_signer(tmp_path).sign(make_file(facts=None), "png", MARK, (), None)
    active = get_active(read_own(signed, "png"))
    assert [one["label"] for one in active["assertions"]] == ["c2pa.actions.v2"]
    assert b"circles" not in signed and b"shapes" not in signed


# -- pictures that began with pictures


def add_input(directory: Path, role: Any, data: bytes, **changed: Any) -> MarkedInput:
    path = directory / f"{role}-{len(list(directory.iterdir()))}"
    path.write_bytes(data)
    return MarkedInput(role, path, read_mark(data, role), **changed)


def test_an_edit_keeps_the_manifest_of_its_picture(tmp_path: Path) -> None:
    mark, signer = PictureMark(COMPOSITE), open_signer(tmp_path)
    signed = signer.sign(make_file("jpeg"), "jpeg", MARK, (), FACTS)
    kept = add_input(tmp_path, "image", signed, has_manifest=True, keeps_manifest=True)
    edited = signer.sign(make_file(), "png", mark, (kept,), FACTS)
    found = read_own(edited, "png", authority().pem)
    assert found["validation_state"] == "Trusted"
    active = get_active(found)
    (ingredient,) = active["ingredients"]
    assert ingredient["relationship"] == "parentOf"
    assert found["manifests"][ingredient["active_manifest"]]["signature_info"]["common_name"]
    opened, changed = get_assertion(active, "c2pa.actions.v2")["actions"]
    assert opened["action"] == "c2pa.opened"
    assert opened["parameters"]["ingredients"][0]["url"].endswith("c2pa.ingredient.v3")
    assert (changed["action"], changed["digitalSourceType"]) == ("c2pa.edited", COMPOSITE)


def test_references_are_placed_and_a_control_picture_is_an_input(tmp_path: Path) -> None:
    signer = open_signer(tmp_path)
    roles = ("reference", "reference", "control")
    inputs = tuple(add_input(tmp_path, role, make_file()) for role in roles)
    active = get_active(read_own(signer.sign(make_file(), "png", MARK, inputs, FACTS), "png"))
    related = [one["relationship"] for one in active["ingredients"]]
    assert related == ["parentOf", "componentOf", "inputTo"]
    actions = [one["action"] for one in get_assertion(active, "c2pa.actions.v2")["actions"]]
    assert actions == ["c2pa.opened", "c2pa.placed", "c2pa.edited"]
    guided = signer.sign(make_file(), "png", MARK, inputs[2:], FACTS)
    assert read_own(guided, "png")["validation_state"] == "Valid"


# -- keys


@pytest.mark.parametrize("name", ["P-384", "P-521", "Ed25519", "RSA"])
def test_keys_of_other_kinds_sign(name: str, tmp_path: Path) -> None:
    key: Any = {
        "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
        "P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
        "Ed25519": ed25519.Ed25519PrivateKey.generate,
        "RSA": lambda: rsa.generate_private_key(65537, 2048),
    }[name]()
    signer = PictureSigner.open(authority().issue(tmp_path, key), lambda _: None)
    signed = signer.sign(make_file(), "png", MARK, (), None)
    assert read_own(signed, "png", authority().pem)["validation_state"] == "Trusted"


def test_a_key_that_does_not_fit_is_refused_without_its_content(tmp_path: Path) -> None:
    settings = authority().issue(tmp_path)
    other, text = tmp_path / "other", (tmp_path / "signer.key").read_text()
    cases: list[tuple[Any, str]] = [
        (lambda: write_key(other, ec.generate_private_key(ec.SECP256R1())), "is not that of"),
        (lambda: write_key(other, ec.generate_private_key(ec.SECP256R1()), b"x"), "can be used"),
        (lambda: other.write_text(text[:60]), "can be used"),
        (lambda: other.write_bytes(b"x" * (2 << 20)), "too large for key"),
        (other.unlink, "cannot read the key"),
    ]
    for prepare, message in cases:
        prepare()
        with pytest.raises(UsageError, match=message) as caught:
            PictureSigner.open(replace(settings, key=str(other)), lambda _: None)
        secret = text.splitlines()[1]
        assert secret[:20] not in f"{caught.value} {caught.value.hint} {caught.value.facts}"


def test_certificates_that_cannot_sign_are_refused_at_the_start(tmp_path: Path) -> None:
    root = Authority.make("Own")
    chain, key = tmp_path / "own.pem", tmp_path / "own.key"
    chain.write_text(root.pem)
    write_key(key, root.key)
    signer = PictureSigner.open(SigningSettings(str(chain), str(key)), lambda _: None)
    with pytest.raises(UsageError, match=r"own\.pem cannot sign pictures"):
        signer.check()
    chain.write_text("no certificates")
    with pytest.raises(UsageError, match="has no certificates in PEM"):
        PictureSigner.open(SigningSettings(str(chain), str(key)), lambda _: None)


def test_a_signer_shows_its_name_and_not_its_key(tmp_path: Path) -> None:
    signer = open_signer(tmp_path)
    signer.check()
    assert signer.name == "Test pictures"
    assert "PRIVATE KEY" not in repr(signer) and "BEGIN" not in repr(signer)


SIGN = """
import sys
from pathlib import Path
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
key = serialization.load_pem_private_key(Path(sys.argv[1]).read_bytes(), None)
sys.stdout.buffer.write(key.sign(sys.stdin.buffer.read(), ec.ECDSA(hashes.SHA256())))
"""


def test_a_command_signs_in_place_of_a_key(tmp_path: Path) -> None:
    key = tmp_path / "signer.key"
    command = (sys.executable, "-c", SIGN, str(key))
    signer = open_signer(tmp_path, key=None, command=command)
    signed = signer.sign(make_file(), "png", MARK, (), FACTS)
    assert read_own(signed, "png", authority().pem)["validation_state"] == "Trusted"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("/absent/program",), "cannot be started: No such file"),
        (("false",), "fails with the exit code 1"),
        (("true",), "writes no signature"),
        (("sleep", "60"), "takes more than 0.1 seconds"),
    ],
)
def test_a_command_that_fails_is_an_error_that_names_it(
    command: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command[0] == "sleep":
        monkeypatch.setattr(signer_module, "_COMMAND_DEADLINE", 0.1)
    signer = open_signer(tmp_path, key=None, command=command)
    with pytest.raises(ModelError, match=message):
        signer.sign(make_file(), "png", MARK, (), FACTS)
    with pytest.raises(UsageError, match=message):
        signer.check()


# -- time stamps


class StampServer(http.server.ThreadingHTTPServer):
    """A time stamp server. ``answer`` returns a response, or None after a wait."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _StampHandler)
        self.requests, self.released = 0, threading.Event()
        self.answer: Any = lambda _: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class _StampHandler(http.server.BaseHTTPRequestHandler):
    server: StampServer

    def do_POST(self) -> None:
        self.server.requests += 1
        query = self.rfile.read(int(self.headers["Content-Length"]))
        if (body := self.server.answer(query)) is None:
            self.server.released.wait(60)
            return
        self.send_response(200 if body else 500)
        self.send_header("Content-Type", "application/timestamp-reply")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stamps() -> Iterator[StampServer]:
    with StampServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("answer", [None, b"", b"no time stamp"], ids=["mute", "500", "damaged"])
def test_a_picture_without_a_time_stamp_is_signed_or_refused(
    answer: bytes | None, stamps: StampServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if answer is None:
        monkeypatch.setattr(signer_module, "STAMP_DEADLINE", 0.3)
    stamps.answer = lambda _: answer
    settings, said = authority().issue(tmp_path), list[str]()
    signer = PictureSigner.open(replace(settings, timestamp=stamps.url), said.append)
    for _ in range(2):  # the second time, the server is not asked again
        signed = signer.sign(make_file(), "png", MARK, (), FACTS)
        signature = get_active(read_own(signed, "png"))["signature_info"]
        assert "time" not in signature
    until(lambda: stamps.requests == 1)
    assert len(said) == 1
    assert said[0].startswith(stamps.url)
    strict = replace(settings, timestamp=stamps.url, needs_timestamp=True)
    with pytest.raises(NetworkError, match="no time stamp from http"):
        PictureSigner.open(strict, said.append).sign(make_file(), "png", MARK, (), FACTS)
    stamps.released.set()


@pytest.mark.integration
def test_a_time_stamp_of_a_server_is_in_the_signature(stamps: StampServer, tmp_path: Path) -> None:
    openssl = find_program("openssl")
    (tmp_path / "root.pem").write_text(authority().pem)
    write_key(tmp_path / "root.key", authority().key)
    settings = {
        "tsa": {"default_tsa": "stamps"},
        "stamps": {
            "serial": "serial",
            "signer_cert": "tsa.pem",
            "signer_key": "tsa.key",
            "certs": "root.pem",
            "signer_digest": "sha256",
            "default_policy": "1.2.3.4",
            "digests": "sha256",
            "ess_cert_id_alg": "sha256",
        },
    }
    with (tmp_path / "tsa.cnf").open("w") as file:
        parser = configparser.ConfigParser()
        parser.read_dict(settings)
        parser.write(file)
    (tmp_path / "serial").write_text("01")
    usage = ("keyUsage=critical,digitalSignature", "extendedKeyUsage=critical,timeStamping")
    (tmp_path / "tsa.ext").write_text("\n".join(usage))
    for command in (
        "ecparam -name prime256v1 -genkey -noout -out tsa.key",
        "req -new -key tsa.key -subj /O=Tests/CN=Time -out tsa.csr",
        "x509 -req -in tsa.csr -CA root.pem -CAkey root.key -CAcreateserial -days 9 "
        "-extfile tsa.ext -out tsa.pem",
    ):
        words = [openssl, *command.split()]
        run(words, cwd=tmp_path, check=True)

    def stamp(query: bytes) -> bytes:
        (tmp_path / "query").write_bytes(query)
        command = [openssl, "ts", "-reply", "-config", "tsa.cnf", "-queryfile", "query"]
        command += ["-out", "reply"]
        run(command, cwd=tmp_path, check=True)
        return (tmp_path / "reply").read_bytes()

    stamps.answer = stamp
    signer = open_signer(tmp_path, timestamp=stamps.url, needs_timestamp=True)
    found = read_own(signer.sign(make_file(), "png", MARK, (), FACTS), "png", authority().pem)
    assert found["validation_state"] == "Trusted"
    assert get_active(found)["signature_info"]["time"]


# -- the configuration


def test_paths_of_the_configuration_are_relative_to_it(tmp_path: Path) -> None:
    section = {"chain": "chain.pem", "key": "/keys/signer.key", "timestamp": "http://tsa.example"}
    document = {"picture": {"signing": section | {"requireTimestamp": True}}}
    assert parse_signing(document, tmp_path / "config.json") == SigningSettings(
        str(tmp_path / "chain.pem"),
        "/keys/signer.key",
        timestamp="http://tsa.example",
        needs_timestamp=True,
    )
    assert parse_signing({}, None) is None


def test_a_signed_picture_is_decoded_as_any_other(tmp_path: Path) -> None:
    signer = open_signer(tmp_path)
    for kind in KINDS:
        signed = signer.sign(make_file(kind), kind, MARK, (), FACTS)
        with Image.open(io.BytesIO(signed)) as image:
            image.load()
            assert image.size == (32, 16)
