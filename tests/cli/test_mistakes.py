"""Likely mistakes produce a message and an exit code (tests.process rejects tracebacks)."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.dialect import DIALECTS, AImage
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.registry import session
from tests.process import PROGRAM, Aimage, run
from tests.real_registry import RealRegistry
from tests.scripted import Answer, ScriptedRegistry, Seen, artifact, serving, skip_waiting
from tests.store import unshare
from tests.wait import until


def _one_sentence(err: str) -> str:
    first, *_ = [line for line in err.splitlines() if line.startswith("aimage: ")]
    return first


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("push", "x"), 2), (("rm", "x"), 3), (("run", "x", "a prompt"), 3)],
    ids=["push", "rm", "run"],
)
def test_an_unknown_reference_fails(
    arguments: tuple[str, ...], code: int, aimage: Callable[..., Aimage]
) -> None:
    done = aimage()(*arguments, code=code)
    assert "x:latest" in _one_sentence(done.err)
    assert done.out == ""


def test_push_of_an_unknown_name_fails(aimage: Callable[..., Aimage]) -> None:
    done = aimage()("push", "localhost:1/x", code=3)
    assert "localhost:1/x:latest not found in the store" in done.err


@pytest.mark.parametrize("words", [("serve", "--port", 80), ("registry", "serve", "--host", "x")])
def test_options_of_other_servers_name_the_address(
    words: tuple[Any, ...], aimage: Callable[..., Aimage]
) -> None:
    assert "--addr HOST:PORT sets the address and the port" in aimage()(*words, code=2).err
    assert "--addr" not in aimage()("ls", *words[-2:], code=2).err


def test_a_local_name_is_never_pulled(aimage: Callable[..., Aimage]) -> None:
    done = aimage()("pull", "library/x", code=2)
    assert "has no registry host" in done.err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "Upper/Case",
            "use lower case: upper/case; to pack a model of the Hugging Face hub: aimage",
        ),
        ("localhost:5000/Team/Model:V1", "localhost:5000/team/model:V1"),
        ("a/../b", "invalid reference 'a/../b'"),
        ("x:", "invalid tag"),
        ("x@sha256:abc", "invalid sha256 digest"),
    ],
)
def test_invalid_names_are_refused(
    name: str, said: str, aimage: Callable[..., Aimage], tiny: Path
) -> None:
    here = aimage()
    assert said in here("create", name, tiny, code=2).err
    assert said in here("pull", name, code=2).err
    assert not here.store.exists()


def test_an_unreachable_registry_fails_at_once(
    aimage: Callable[..., Aimage], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = skip_waiting(monkeypatch)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = aimage()("pull", f"127.0.0.1:{port}/x", code=1)
    assert waits == []
    assert f"cannot reach 127.0.0.1:{port}: Connection refused" in done.err


def test_an_unknown_host_fails(aimage: Callable[..., Aimage]) -> None:
    done = aimage()("pull", "registry.invalid/x", code=1)
    assert "cannot reach registry.invalid" in done.err


def test_a_silent_registry_times_out_once(
    aimage: Callable[..., Aimage], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert session.CONNECT_TIMEOUT + session.FIRST_READ_TIMEOUT <= 10
    monkeypatch.setattr(session, "FIRST_READ_TIMEOUT", 0.2)
    waits = skip_waiting(monkeypatch)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        done = aimage()("pull", f"127.0.0.1:{silent.getsockname()[1]}/x", code=1)
    assert waits == []
    assert "does not answer in time" in done.err


def test_tls_to_a_plain_http_registry_fails(
    aimage: Callable[..., Aimage], registry: RealRegistry
) -> None:
    port = registry.host.rpartition(":")[2]
    # Not a loopback name, although it resolves to this machine.
    done = aimage()("pull", f"localhost.localdomain:{port}/x", code=1)
    assert "localhost.localdomain" in done.err


@pytest.mark.integration
def test_wrong_credentials_fail(
    aimage: Callable[..., Aimage], private_registry: RealRegistry, tiny: Path
) -> None:
    here = aimage()
    host = private_registry.host
    reference = f"{host}/team/x"
    here("create", reference, tiny, "--whole-files")
    done = here("push", reference, code=4)
    assert f"aimage login {host}" in done.err
    done = here("login", host, "-u", "operator", "--password-stdin", stdin="wrong\n", code=4)
    assert done.out == ""
    assert not (here.home / "docker" / "config.json").exists()
    here("login", host, "-u", "operator", "--password-stdin", stdin="open sesame\n")
    config = here.home / "docker" / "config.json"
    assert config.stat().st_mode & 0o777 == 0o600
    digest = here("push", reference).line
    assert aimage("there")("pull", reference).line == digest
    here("logout", host)
    assert here("pull", reference, code=4).out == ""
    assert here("logout", host, code=3).out == ""


@pytest.mark.integration
def test_a_credential_helper_is_used(
    aimage: Callable[..., Aimage], private_registry: RealRegistry, tiny: Path, tmp_path: Path
) -> None:
    helpers = tmp_path / "bin"
    helpers.mkdir()
    helper = helpers / "docker-credential-test"
    helper.write_text(
        '#!/bin/sh\n[ "$1" = get ] && echo \'{"Username":"operator","Secret":"open sesame"}\'\n'
    )
    helper.chmod(0o755)
    here = aimage()
    host = private_registry.host
    config = here.home / "docker" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"credHelpers": {host: "test"}}))
    here.environment["PATH"] = f"{helpers}:{os.environ['PATH']}"
    here("create", f"{host}/helped/x", tiny, "--whole-files")
    here("push", f"{host}/helped/x")


def test_a_broken_docker_config_fails(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    (here.home / "docker").mkdir()
    (here.home / "docker" / "config.json").write_text("{")
    assert "config.json" in here("pull", "localhost:1/x", code=1).err


def test_a_store_that_is_a_file_fails(aimage: Callable[..., Aimage], tiny: Path) -> None:
    here = aimage()
    here.store.write_text("hello")
    for arguments in (("ls",), ("create", "x", tiny), ("show", "x")):
        assert f"{here.store} is not a directory" in here(*arguments, code=1).err
    assert here.store.read_text() == "hello"


@pytest.mark.skipif(os.geteuid() == 0 and not hasattr(os, "setresuid"), reason="needs a user")
def test_a_store_without_permission_fails(
    aimage: Callable[..., Aimage], tiny: Path, tmp_path: Path
) -> None:
    here = aimage()
    here.store.mkdir()
    here.store.chmod(0o500)
    if os.access(here.store, os.W_OK):
        pytest.skip("root may write everywhere")
    assert "Permission denied" in here("create", "x", tiny, code=1).err


def test_an_invalid_index_fails(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    here.store.mkdir()
    (here.store / "index.json").write_text("[]")
    for verb in ("ls", "gc", "verify"):
        assert "is not an OCI index" in here(verb, code=1).err
    assert "is not an OCI index" in here("show", "x", code=1).err


def test_a_full_disk_fails_without_partial_blobs(aimage: Callable[..., Aimage], tiny: Path) -> None:
    """A tmpfs of 512 KiB is the full disk: which blobs fit is a matter of chance."""
    here = aimage()
    small = _on_small_disk(here)
    if small is None:
        pytest.skip("no small disk can be mounted here")
    try:
        done = here("create", "x", tiny, code=6)
        assert "no space left" in done.err
        assert not (here.store / "index.json").exists()
        _check_blobs(here.store)
        assert not list((here.store / ".aimage" / "ingest").iterdir())
    finally:
        run(["umount", str(here.store)], check=True)


def _check_blobs(store: Path) -> None:
    """Every blob has its digest as its name; there may be none, and not even their directory."""
    for blob in (store / "blobs" / "sha256").glob("*"):
        assert Descriptor.of("", blob.read_bytes()).digest.encoded == blob.name


def _on_small_disk(here: Aimage) -> Path | None:
    here.store.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(here.store)]
    return here.store if run(mount).returncode == 0 else None


@pytest.mark.integration
def test_ctrl_c_during_a_pull(aimage: Callable[..., Aimage]) -> None:
    """The exit code is 130 while the registry stalls, and no incomplete file has a final name."""
    manifest, blobs = artifact(b"{}", b"x" * 3_000_000)
    right = serving(manifest, blobs)

    def script(seen: Seen) -> Answer:
        answer = right(seen)
        if len(answer.body) > 1000 and "bytes=0-" not in seen.headers.get("Range", ""):
            answer.cut, answer.hang = 1000, True  # all but the first chunk stall
        return answer

    here = aimage()
    with ScriptedRegistry(script).running() as registry:
        process = here.start("pull", f"{registry.host}/x")
        # The manifest, the config and the blob
        until(lambda: len(registry.asked("GET")) >= 3, "a request for the blob")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    names = [path.name for path in (here.store / "blobs").rglob("*") if path.is_file()]
    assert all(len(blobs[f"sha256:{name}"]) < 100 for name in names)
    assert here("ls", "--json").value == []


@pytest.mark.integration
def test_ctrl_c_during_a_create(aimage: Callable[..., Aimage], tiny: Path, tmp_path: Path) -> None:
    """A stopped process simulates a slow disk; a pipe as a weight file would block."""
    here = aimage()
    process = here.start("create", "x", tiny)
    until((here.store / "blobs").is_dir, "the directory of blobs")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode in (130, 0)  # 0: it ended before the signal arrived
    layout = ImageLayout(here.store)
    _check_blobs(here.store)
    if process.returncode == 130:
        assert list(layout.list_tags()) == []


def test_a_closed_pipe_is_not_an_error(stocked: Callable[[], Aimage]) -> None:
    here = stocked()
    shell = " ".join(PROGRAM) + " show x --layers | head -1"
    done = run(
        ["bash", "-o", "pipefail", "-c", shell],
        text=True,
        env=here.env(),
    )
    assert done.stderr == ""


def test_usage_errors_exit_with_2(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    for arguments in (("frobnicate",), ("pull",), ("pull", "x", "--jobs", "0"), ("ls", "--what")):
        done = here(*arguments, code=2)
        assert "see: aimage" in done.err or "unknown verb" in done.err
    assert "--plain-http" in here("pull", "a.b/x", "--plain-http", "--insecure", code=2).err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--width", 100), "width must be a multiple of 16"),
        (("--steps", 0), "steps must be"),
        (("--guidance-end", "1.5"), "guidance_end must be a number from 0 to 1, not 1.5"),
        (("--cache-threshold", "-1"), "cache_threshold must be a number from 0 to 10, not -1"),
        (("--dtype", "float16"), "float16"),
        (("--negative", "blur"), "negative requires guidance above 0"),
        (("-o", "x.gif"), "unknown picture format: x.gif"),
        (("--size", "12"), 'size must be "auto" or WIDTHxHEIGHT, such as "1024x1024"'),
        (("--size", "1000x"), 'size must be "auto" or WIDTHxHEIGHT'),
        (("--size", "100x96"), "size must have a width that is a multiple of 16"),
        (("--size", "64x64", "--width", 64), "--size cannot be combined"),
    ],
)
def test_invalid_image_options_are_refused(
    arguments: tuple[str | int, ...], said: str, stocked: Callable[[], Aimage]
) -> None:
    here = stocked()
    done = here("run", "x", "a fox", *arguments, code=2)
    assert said in done.err
    assert not list(here.home.glob("*.png"))


@pytest.mark.parametrize(
    "arguments",
    [("--width", 0), ("--steps", 1001), ("-n", 0), ("--seed", 1 << 64), ("--guidance", -1)],
)
def test_parameters_of_no_model_are_refused_before_a_registry_is_asked(
    arguments: tuple[str, int], aimage: Callable[..., Aimage]
) -> None:
    with ScriptedRegistry(lambda _: Answer(404)).running() as registry:
        done = aimage()("run", f"{registry.host}/x", "a fox", *arguments, code=2)
    assert f"{arguments[0].replace('-', '')} must be" in done.err
    assert registry.seen == []


def test_a_size_that_a_model_does_not_support_is_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, stocked: Callable[[], Aimage]
) -> None:
    from clowder_aimage.model.weights import ModelWeights

    monkeypatch.setattr(ModelWeights, "open", lambda *_: pytest.fail("weights are read"))
    here = stocked()
    for side in (100, 1 << 20):
        assert "height must be" in here("run", "x", "a fox", "--height", side, code=2).err


def test_a_missing_output_directory_fails(stocked: Callable[[], Aimage]) -> None:
    here = stocked()
    done = here("run", "x", "a fox", "--steps", 1, "-o", "no/such/place/x.png", code=1)
    assert "directory not found: no/such/place" in done.err


def test_replay_says_which_registry_is_asked(aimage: Callable[..., Aimage]) -> None:
    from clowder_aimage.model.picture import encode_picture

    here, pixels = aimage(), np.zeros((16, 16, 3), np.uint8)
    with ScriptedRegistry(lambda _: Answer(404)).running() as registry:
        facts = {"reference": f"{registry.host}/x:v1", "digest": f"sha256:{'0' * 64}"}
        facts["prompt"] = "a fox"
        (here.home / "x.png").write_bytes(encode_picture(pixels, facts))
        done = here("replay", "x.png", code=3)
    assert f"x.png names the registry {registry.host}, which is asked for the model" in done.err


def test_replay_of_a_file_that_is_not_an_image_fails(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    (here.home / "x.png").write_bytes(b"not a picture")
    assert "not a valid PNG" in here("replay", "x.png", code=2).err
    assert "y.png not found" in here("replay", "y.png", code=3).err


def test_a_damaged_blob_is_detected_before_it_is_pushed(
    aimage: Callable[..., Aimage], tiny: Path, repository: str
) -> None:
    here = aimage()
    here("create", repository, tiny)
    layers = here("show", repository, "--json").value["layers"]
    largest = max(layers, key=lambda layer: layer["size"])
    blob = here.store / "blobs" / "sha256" / largest["digest"][7:]
    unshare(blob)
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    done = here("push", repository, code=5)
    assert largest["digest"] in done.err


@pytest.mark.integration
def test_run_with_256_open_files(stocked: Callable[[], Aimage]) -> None:
    """256 open files are the default on macOS."""
    here = stocked()
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))  # noqa: E731
    done = run(
        [*PROGRAM, "run", "x", "a fox", "--steps", "1", "-o", "x.png"],
        env=here.env(),
        cwd=here.home,
        text=True,
        preexec_fn=limit,
    )
    assert done.returncode == 0, done.stderr


def test_login_without_a_terminal_needs_options(aimage: Callable[..., Aimage]) -> None:
    done = aimage()("login", "localhost:1", code=2)
    assert "use --username" in done.err
    done = aimage()("login", "localhost:1", "-u", "x", code=2)
    assert "use --password-stdin" in done.err


@pytest.mark.parametrize(
    "change",
    [
        {"defaults": [1]},
        {"defaults": {"width": 17}},
        {"components": []},
        {"parameters": 10**300},
        {"license": "\x1b]0;title\x07"},
    ],
    ids=str,
)
def test_an_invalid_config_fails(change: dict[str, Any], stocked: Callable[[], Aimage]) -> None:
    """Configs from a registry neither crash a command nor control the terminal."""
    here = stocked()
    layout = ImageLayout(here.store)
    stored = read_aimage(layout, Reference.parse("x"))
    config = json.dumps({**stored.aimage.properties, **change}).encode()
    manifest, config = DIALECTS["clowder"].write(AImage(config, stored.aimage.layers))
    layout.push(manifest.config, build_bytes_body(config))
    layout.push(manifest.descriptor, build_bytes_body(manifest.raw), Reference.parse("evil"))
    shown = here("show", "evil")
    assert "\x1b" not in shown.out
    code = 0 if "license" in change else 5
    assert here("run", "evil", "a fox", "--steps", 1, code=code).code == code


def test_a_model_does_not_set_the_prompt_or_the_seed(stocked: Callable[[], Aimage]) -> None:
    here = stocked()
    layout = ImageLayout(here.store)
    stored = read_aimage(layout, Reference.parse("x"))
    changed = {**stored.aimage.properties, "defaults": {"prompt": "ad", "seed": 1, "width": 32}}
    aimage_ = AImage(json.dumps(changed).encode(), stored.aimage.layers)
    manifest, config = DIALECTS["clowder"].write(aimage_)
    layout.push(manifest.config, build_bytes_body(config))
    layout.push(manifest.descriptor, build_bytes_body(manifest.raw), Reference.parse("evil"))
    facts = here("run", "evil", "a fox", "--steps", 1, "--seed", 9, "--json").value
    assert (facts["prompt"], facts["seed"], facts["width"]) == ("a fox", 9, 32)
    assert facts["dtype"] == "float32"


def test_an_image_on_a_full_disk_fails(stocked: Callable[[], Aimage]) -> None:
    here = stocked()
    small = here.home / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(small)]
    if run(mount).returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        done = here("run", "x", "a fox", "--steps", 1, "--width", 256, "-o", small, code=6)
        assert "no space left for the picture" in done.err
        assert list(small.iterdir()) == []
    finally:
        run(["umount", str(small)], check=True)


@pytest.mark.parametrize(
    "arguments",
    [
        *(("--steps", 0), ("--steps", 1001), ("--steps", "8.5"), ("--steps", "many")),
        *(("--guidance", 1001), ("--guidance", "-1"), ("--guidance", "nan")),
    ],
)
def test_create_and_run_refuse_a_value_in_the_same_words(
    arguments: tuple[str, object], aimage: Callable[..., Aimage], tiny: Path
) -> None:
    here = aimage()
    refused = here("create", "x", tiny, *arguments, code=2)
    assert f"{arguments[0][2:]} must be " in refused.err
    assert refused.err == here("run", "x", "a fox", "--local", *arguments, code=2).err
    assert not here.store.exists()


@pytest.mark.parametrize("option", ["--guidance", "--steps"])
def test_defaults_of_pictures_are_refused_for_other_models(
    aimage: Callable[..., Aimage], tmp_path: Path, option: str
) -> None:
    (tmp_path / "a.bin").write_bytes(b"x")
    done = aimage()("create", "x", "a.bin", "--whole-files", option, 2, code=2)
    assert f"{option[2:]}: only a model that makes pictures has such defaults" in done.err
