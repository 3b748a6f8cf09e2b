"""Worker settings: where they are read from, and how they are shown."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from tests.process import Aimage, Done

pytest.importorskip("pydantic", reason="pydantic is not installed")

from clowder_aimage.cli.console.fleet_access import ACCESS_OPTIONS
from clowder_aimage.cli.verbs.config import MASK, mask_secret
from clowder_aimage.cli.verbs.registry import serve as serve_registry
from clowder_aimage.cli.verbs.serve import NODE_OPTIONS, serve, spell
from clowder_aimage.config.user_directory import SHARED_VARIABLES, list_server_variables
from clowder_aimage.distribution import role as registry_role
from clowder_aimage.document.schema import load
from clowder_aimage.engine.endpoint import DEFAULT_HOST
from clowder_aimage.engine.settings import (
    Settings,
    camel,
    gather,
    parse_duration,
    read_section,
)
from clowder_aimage.errors import UsageError
from clowder_aimage.registry.host_settings import read_settings

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a configuration file, in an environment without AIMAGE variables."""
    import os

    for name in os.environ:
        if name.startswith("AIMAGE_"):
            monkeypatch.delenv(name)
    return tmp_path / "config.json"


def written(file: Path, **worker: Any) -> Path:
    file.write_text(json.dumps({"worker": worker}))
    return file


# -- durations


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *((0, 0.0), ("0", 0.0), (90, 90.0), (1.5, 1.5), ("90", 90.0), ("1.5", 1.5)),
        *(("500ms", 0.5), ("30s", 30.0), ("5m", 300.0), ("1h30m", 5400.0), ("1H", 3600.0)),
        *(("99999999h", math.inf), (10**400, math.inf), ("9" * 400, math.inf)),
        *(("100h" * 5000, 100.0 * 3600 * 5000), ("876000h", math.inf), (3153599999, 3153599999.0)),
        *((-1, math.inf), ("-1", math.inf), ("-5m", math.inf), ("-0", 0.0)),
    ],
)
def test_durations_are_parsed(text: float | str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "-", "m", "5x", "5 m", "1e3", "inf", "nan", math.nan, True, None, "5m3", "--5"]
)
def test_durations_that_are_not_valid_are_refused(text: str | float | None) -> None:
    with pytest.raises(ValueError, match="invalid duration"):
        parse_duration(text)


# -- precedence


def test_defaults_apply_without_any_setting(file: Path) -> None:
    said, origins = gather(Settings, {}, file)
    assert origins == {}
    assert said.address == DEFAULT_HOST == "127.0.0.1:11434"
    assert (said.text_encoder, said.memory) == ("auto", None)
    assert (said.pull, said.stream_format, said.png_facts) == ("if-missing", "auto", True)
    limits = said.limits
    assert (limits.queue, limits.models, limits.keep_alive) == (8, None, 300.0)
    assert limits.deadline == math.inf
    assert (limits.text_deadline, limits.picture_deadline) == (600.0, 20.0)


def test_the_command_line_overrides_the_environment_and_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(file, queue=1, maxModels=2, keepAlive="1h", aliases={"gpt-image-1": "tiny"})
    monkeypatch.setenv("AIMAGE_SERVE_MAX_MODELS", "3")
    monkeypatch.setenv("AIMAGE_SERVE_KEEP_ALIVE", "2h")
    monkeypatch.setenv("AIMAGE_SERVE_DTYPE", "")
    said, origins = gather(Settings, {"keep_alive": "-1", "queue": None, "wanted": ()}, file)
    assert (said.queue, said.max_models, said.keep_alive) == (1, 3, math.inf)
    assert said.aliases == {"gpt-image-1": "tiny"}
    assert origins == {
        "queue": str(file),
        "aliases": str(file),
        "max_models": "AIMAGE_SERVE_MAX_MODELS",
        "keep_alive": "command line",
    }


def test_lists_and_pairs_are_read_from_the_environment(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIMAGE_SERVE_ALIASES", "gpt-image-1=tiny, dall-e-3 = team/tiny:v1,")
    monkeypatch.setenv("AIMAGE_SERVE_WANTED", "tiny, team/tiny:v1")
    monkeypatch.setenv("AIMAGE_SERVE_ALLOW_HOSTS", "pictures.example")
    said, _ = gather(Settings, {}, file)
    assert said.aliases == {"gpt-image-1": "tiny", "dall-e-3": "team/tiny:v1"}
    assert said.wanted == ("tiny", "team/tiny:v1")
    assert said.allow_hosts == ("pictures.example",)


def test_memory_settings_are_parsed_from_all_sources(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(file, memory="12GiB", textEncoder="keep")
    said, _ = gather(Settings, {}, file)
    assert (said.memory, said.text_encoder) == (12 << 30, "keep")
    monkeypatch.setenv("AIMAGE_SERVE_MEMORY", "1.5g")
    monkeypatch.setenv("AIMAGE_SERVE_TEXT_ENCODER", "auto")
    said, _ = gather(Settings, {"text_encoder": "release"}, file)
    assert (said.memory, said.text_encoder) == (1_500_000_000, "release")
    assert gather(Settings, {"memory": "500M"}, file)[0].memory == 500_000_000
    assert gather(Settings, {}, written(file, memory=1000))[0].pull == "if-missing"


def test_request_defaults_are_read_from_all_sources(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(file, pull="never", streamFormat="openai", pngFacts=False)
    said, _ = gather(Settings, {}, file)
    assert (said.pull, said.stream_format, said.png_facts) == ("never", "openai", False)
    monkeypatch.setenv("AIMAGE_SERVE_PNG_FACTS", "true")
    assert gather(Settings, {}, file)[0].png_facts
    said, origins = gather(Settings, {"png_facts": False}, file)
    assert (said.png_facts, origins["png_facts"]) == (False, "command line")


def test_relative_paths_are_resolved_against_the_file(file: Path) -> None:
    written(file, socket="run/s", tokenFile="/etc/tokens")
    assert read_section(file) == {
        "socket": str(file.parent / "run" / "s"),
        "token_file": "/etc/tokens",
    }
    assert gather(Settings, {}, file)[0].address is None


@pytest.mark.parametrize(
    ("said", "url"),
    [
        ("https://a.example", "https://a.example"),
        ("https://a.example:8443/here/", "https://a.example:8443/here"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_the_public_url_is_read_from_options_and_file(file: Path, said: str, url: str) -> None:
    assert gather(Settings, {"public_url": said}, file)[0].public_url == url
    assert gather(Settings, {}, written(file, publicUrl=said))[0].public_url == url
    assert gather(Settings, {}, written(file))[0].public_url is None


@pytest.mark.parametrize(
    ("options", "environment", "sentence"),
    [
        ({"keep_alive": "soon"}, {}, "--keep-alive: invalid duration 'soon'"),
        ({"aliases": "x"}, {}, "--alias: invalid alias 'x', expected NAME=REF"),
        ({"aliases": "x=Tiny"}, {}, "invalid reference 'Tiny'"),
        ({"default_model": "Tiny"}, {}, "--default-model: invalid reference 'Tiny'"),
        ({"dtype": "float16"}, {}, "--dtype: Input should be 'float32'"),
        ({"device": "gpu"}, {}, "--device: unknown device 'gpu': use cuda, cuda:1 and so on"),
        ({"memory": "much"}, {}, "--memory: invalid size 'much': expected a value such as"),
        ({"memory": "-1"}, {}, "--memory: invalid size '-1'"),
        (
            {"public_url": "pictures.example"},
            {},
            "--public-url: expected a base URL such as https://",
        ),
        ({"public_url": "ftp://a.example"}, {}, "--public-url: expected a base URL"),
        ({"public_url": "https://me:x@a.example"}, {}, "--public-url: expected a base URL"),
        ({"public_url": "https://a.example/?x"}, {}, "--public-url: expected a base URL"),
        (
            {},
            {"AIMAGE_SERVE_PUBLIC_URL": "x"},
            "publicUrl (AIMAGE_SERVE_PUBLIC_URL): expected a base URL",
        ),
        ({"text_encoder": "leave"}, {}, "--text-encoder: Input should be 'auto'"),
        ({}, {"AIMAGE_SERVE_PULL": "sometimes"}, "pull (AIMAGE_SERVE_PULL): Input should be"),
        ({}, {"AIMAGE_SERVE_STREAM_FORMAT": "sse"}, "streamFormat (AIMAGE_SERVE_STREAM_FORMAT): "),
        ({}, {"AIMAGE_SERVE_PNG_FACTS": "perhaps"}, "pngFacts (AIMAGE_SERVE_PNG_FACTS): "),
        ({}, {"AIMAGE_SERVE_QUEUE": "many"}, "queue (AIMAGE_SERVE_QUEUE): "),
        ({}, {"AIMAGE_SERVE_MAX_MODELS": "0"}, "maxModels (AIMAGE_SERVE_MAX_MODELS): "),
    ],
)
def test_invalid_options_and_variables_are_refused_by_name(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str],
    environment: dict[str, str],
    sentence: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=re.escape(sentence)):
        gather(Settings, options, file, spell)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", '{"worker": []}', '{"worker": {"queue": -1}}', '{"worker": {"addr": 1}}'),
        *(
            '{"worker": {"keepAlive": "soon"}}',
            '{"worker": {"maxModels": 1.0}}',
            '{"worker": null}',
        ),
        *('{"worker": {"memory": "much"}}', '{"worker": {"memory": -1}}'),
        *('{"worker": {"pngFacts": "no"}}', '{"worker": {"pull": true}}'),
        *('{"worker": {"aliases": ["a"]}}', '{"worker": {"logFormat": "xml"}}'),
    ],
)
def test_an_invalid_configuration_file_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(UsageError, match="cannot use the configuration"):
        gather(Settings, {}, file)


# -- one set of names


def test_schema_settings_and_options_have_the_same_names() -> None:
    described = load("config")["$defs"]["worker"]["properties"]
    fields = Settings.model_fields
    assert set(described) == {camel(name) for name in fields}
    options = {one.name for one in serve.params if isinstance(one, click.Option)}
    others = {"plain_http", "insecure", "ca_file", "store", "as_json", "quiet", "template"}
    others |= {"accepts_verbose", "yes"}
    others |= {"is_node", "opens", *NODE_OPTIONS, *ACCESS_OPTIONS}
    assert options - others == set(fields) - {"backends"}  # only in files and the environment


def test_the_schema_has_the_defaults_of_the_settings() -> None:
    for name, field in Settings.model_fields.items():
        said = load("config")["$defs"]["worker"]["properties"][camel(name)].get("default")
        if said is not None:
            assert getattr(Settings(**{name: said}), name) == field.default


# -- aimage config show


def shown(done: Done) -> dict[Any, Any]:
    return {one["name"]: (one["value"], one["origin"]) for one in done.value["settings"]}


def test_config_show_lists_every_setting_with_its_origin(
    aimage: Callable[..., Aimage], tmp_path: Path
) -> None:
    here = aimage()
    file = tmp_path / "mine.json"
    registries = {"registry.example.com": {"mirrors": ["mirror.example.com"], "jobs": 4}}
    file.write_text(json.dumps({"registries": registries, "worker": {"queue": 2}}))
    here.environment |= {"AIMAGE_CONFIG": str(file), "AIMAGE_SERVE_GRACE": "1m"}
    done = here("config", "show", "--json")
    assert (done.value["file"], done.value["exists"]) == (str(file), True)
    found = shown(done)
    assert found["store"] == (str(here.store), "AIMAGE_STORE")
    assert found["worker.queue"] == (2, str(file))
    assert found["worker.grace"] == (60.0, "AIMAGE_SERVE_GRACE")
    assert found["worker.maxModels"] == (None, "default")
    assert found["worker.deadline"] == (-1, "default")
    assert found["worker.textEncoder"] == ("auto", "default")
    assert found["worker.memory"] == (None, "default")
    assert found["worker.pngFacts"] == (True, "default")
    assert found["registries.registry.example.com.jobs"] == (4, str(file))
    lines = here("config", "show", "--store", tmp_path / "other").out.splitlines()
    assert lines[0].split() == ["NAME", "VALUE", "ORIGIN"]
    assert lines[1].split() == ["config", str(file), "AIMAGE_CONFIG"]
    assert lines[2].split() == ["store", str(tmp_path / "other"), "command", "line"]
    assert ["worker.grace", "1m", "AIMAGE_SERVE_GRACE"] in map(str.split, lines)
    assert ["worker.keepAlive", "5m", "default"] in map(str.split, lines)
    assert ["worker.queue", "2", str(file)] in map(str.split, lines)


YAML = """\
# for all workers
registries:
  registry.example.com: {limitRate: 20M, chunkSize: 5MB}
worker:
  keepAlive: 1h30m
  memory: 12GiB
"""


def test_the_configuration_may_be_yaml(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    directory = here.home / "config" / "aimage"
    directory.mkdir(parents=True)
    file = directory / "config.yaml"
    file.write_text(YAML)
    found = shown(here("config", "show", "--json"))
    assert found["config"] == (str(file), "default")
    assert found["worker.keepAlive"] == (5400.0, str(file))
    assert found["worker.memory"] == (12 * 1024**3, str(file))
    rows = [line.split() for line in here("config", "show").out.splitlines()]
    assert ["worker.keepAlive", "1h30m", str(file)] in rows
    assert ["worker.memory", "12GiB", str(file)] in rows
    assert read_settings(file)[0]["registry.example.com"].chunk_size == 5_000_000
    assert here("validate", file).line == f"{file}: valid config"
    file.write_text("# nothing yet\n")
    assert shown(here("config", "show", "--json"))["worker.keepAlive"] == (300.0, "default")
    (directory / "config.json").write_text("{}")
    err = here("config", "show", code=2).err
    assert f"there are two configurations: {directory / 'config.json'} and {file}" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("worker: {keepalive: 5m}", "unknown key 'keepalive'; did you mean 'keepAlive'?"),
        ("worker: {queue: 1}\nworker: {}", "line 2: duplicate key 'worker'"),
        ("worker: &a {queue: 1}\nnode: *a", "line 2: aliases (*name) are not supported"),
        ("worker: [", "line "),
        ("- worker", "is not of type 'object'"),
        ("registries: {h.io: {chunkSize: 5kB}}", "chunkSize '5kB' is smaller than 1 MiB"),
        ("worker: {queue: '\udcff'}", "can't decode byte"),
    ],
)
def test_an_invalid_yaml_configuration_is_refused(
    aimage: Callable[..., Aimage], text: str, message: str
) -> None:
    here = aimage()
    here.environment["AIMAGE_CONFIG"] = str(here.home / "bad.yml")
    (here.home / "bad.yml").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert message in here("config", "show", code=2).err
    if "chunkSize" not in text and not text.startswith("-"):  # a list is a desired state
        assert message in here("validate", "bad.yml", code=5).out


def test_violations_of_yaml_documents_have_lines(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    (here.home / "bad.yaml").write_text("worker:\n  queue: 1\n  keepAlive: soon\n")
    assert here("validate", "bad.yaml", code=5).out.startswith("bad.yaml:3:1: /worker/keepAlive: ")
    (here.home / "list.yaml").write_text("- {ref: localhost/a, pin: 1}\n")
    assert "list.yaml:1:1: /0/pin: " in here("validate", "list.yaml", code=5).out


def test_only_an_explicitly_named_file_must_exist(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    done = here("config", "show", "--json").value
    assert (done["exists"], done["file"].endswith("/aimage/config.json")) == (False, True)
    here.environment["AIMAGE_CONFIG"] = str(here.home / "absent.json")
    for verb in (("config", "show"), ("serve",)):
        assert "file in AIMAGE_CONFIG not found" in here(*verb, code=2).err


def test_config_show_masks_secrets(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    secret = "open-sesame"
    here.environment |= {
        "AIMAGE_TOKEN": secret,
        "HTTPS_PROXY": f"http://operator:{secret}@proxy.example.com:3128",
        "http_proxy": f"operator:{secret}@proxy.example.com:3128",
        "AIMAGE_HOST": f"http://me:{secret}@worker.example.com",
    }
    for arguments in (("config", "show"), ("config", "show", "--json")):
        done = here(*arguments)
        assert secret not in done.out + done.err
        assert "proxy.example.com:3128" in done.out


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("AIMAGE_TOKEN", "x", MASK),
        ("AIMAGE_TOKEN_FILE", "/etc/t", "/etc/t"),
        ("HTTPS_PROXY", "http://a:b@h:1/", f"http://{MASK}@h:1/"),
        ("HTTPS_PROXY", "http://h:1", "http://h:1"),
        ("HTTPS_PROXY", "http://a:b@[", f"http://{MASK}@["),
        ("HTTPS_PROXY", "http://a:b#c@h:1/", f"http://{MASK}@h:1/"),
        ("HTTPS_PROXY", "http://a:b/c@h:1", f"http://{MASK}@h:1"),
        ("HTTPS_PROXY", "http://a:b?c@d@h:1", f"http://{MASK}@h:1"),
        ("http_proxy", "a:b#c@h:1", f"{MASK}@h:1"),
        ("AIMAGE_HOST", "http://me@h", f"http://{MASK}@h"),
        ("DOCKER_CONFIG", "/home/me@h/.docker", "/home/me@h/.docker"),
        ("NO_PROXY", "localhost,.example.com", "localhost,.example.com"),
    ],
)
def test_credentials_in_values_are_masked(name: str, value: str, said: str) -> None:
    assert mask_secret(name, value) == said


def test_invalid_aliases_are_refused_from_option_and_environment(
    aimage: Callable[..., Aimage],
) -> None:
    here = aimage()
    here.environment["AIMAGE_SERVE_ALIASES"] = "a"
    said = here("serve", "--addr", "127.0.0.1:0", code=2).err
    assert "aliases (AIMAGE_SERVE_ALIASES): invalid alias 'a', expected NAME=REF" in said
    assert "invalid alias 'b', expected NAME=REF" in here("serve", "--alias", "b", code=2).err
    assert "invalid duration" in here("serve", "--keep-alive", "soon", code=2).err


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"defaultModle": "x"}, "unknown key 'defaultModle'"),
        ({"worker": {"defaultModle": "x"}}, "did you mean 'defaultModel'?"),
        ({"node": {"neighbors": []}}, "did you mean 'neighbours'?"),
        ({"registries": {"a.example": {"mirror": ["b.example"]}}}, "did you mean 'mirrors'?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(
    tmp_path: Path, document: dict[str, Any], message: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(document))
    with pytest.raises(UsageError) as caught:
        gather(Settings, {}, file)
    assert message in caught.value.message
    assert str(file) in caught.value.message


def test_the_url_of_the_schema_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"$schema": "https://x.example/config.schema.json"}))
    assert gather(Settings, {}, file)[1] == {}


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("AIMAGE_SERVE_KEEPALIVE", "did you mean AIMAGE_SERVE_KEEP_ALIVE?"),
        ("AIMAGE_SERVE_XYZXYZXYZXYZXYZXYZXYZXYZXYZ", None),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, variable: str, hint: str | None
) -> None:
    monkeypatch.setenv(variable, "5m")
    with pytest.raises(UsageError, match=f"unknown environment variable {variable}") as caught:
        gather(Settings, {}, None)
    assert caught.value.hint == hint


def test_a_misspelt_variable_of_all_verbs_is_reported(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    here.environment |= {"AIMAGE_STROE": "x", "AIMAGE_SERVER_ADDR": "x", "AIMAGE_DIGEST": "mine"}
    here.environment |= {"AIMAGE_PORT": "tcp://10.0.0.1:80", "AIMAGE_REGISTRY": "r.example.com"}
    warned = [line for line in here("ls", "-q").err.splitlines() if "variable" in line]
    assert warned == [
        "warning: unknown environment variable AIMAGE_STROE; did you mean AIMAGE_STORE?",
        "warning: unknown environment variable AIMAGE_SERVER_ADDR; did you mean AIMAGE_SERVE_ADDR?",
    ]
    notes = [json.loads(line) for line in here("ls", "-q", "--json").err.splitlines()]
    assert [note["message"] for note in notes[:2]] == warned


def test_every_variable_that_the_program_reads_is_known() -> None:
    servers = (list_server_variables(section) for section in ("worker", "node", "registry"))
    known = {*SHARED_VARIABLES, *(name for one in servers for name in one.values())}
    text = "".join(path.read_text("utf-8") for path in (ROOT / "clowder_aimage").rglob("*.py"))
    read = set(re.findall(r"(?:environ(?:\.get)?|_named)[\[(]\s*[\"'](AIMAGE_[A-Z_]+)", text))
    assert "AIMAGE_STORE" in read and read <= known


# -- the registry that aimage serves


def test_the_schema_and_the_options_of_the_registry_have_the_same_names() -> None:
    described = load("config")["$defs"]["registry"]["properties"]
    options = {str(one.name): one for one in serve_registry.params}
    for key, variable in list_server_variables("registry").items():
        option = options.pop(variable.removeprefix("AIMAGE_REGISTRY_").lower())
        assert option.envvar == variable
        assert key != "addr" or option.default == described[key]["default"]
    others = {"plain_http", "insecure", "ca_file", "store", "as_json", "quiet", "template"}
    others |= {"accepts_verbose"}
    assert set(options) == others


def test_the_registry_is_configured_by_file_environment_and_options(
    aimage: Callable[..., Aimage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[dict[str, Any]] = []
    monkeypatch.setattr(
        registry_role, "serve", lambda _, addr, **more: served.append({"addr": addr, **more})
    )
    (tmp_path / "token").write_text("write s3cret-s3cret-s3cret\n")
    (tmp_path / "token").chmod(0o600)
    file, here = tmp_path / "mine.json", aimage()
    section = {"addr": "127.0.0.1:0", "readonly": True, "tokenFile": "token"}
    file.write_text(json.dumps({"registry": section}))
    here.environment |= {"AIMAGE_CONFIG": str(file), "AIMAGE_REGISTRY_METRICS_ADDR": "127.0.0.1:1"}
    here("registry", "serve")
    here.environment["AIMAGE_REGISTRY_READONLY"] = "false"
    here("registry", "serve", "--addr", "127.0.0.1:2")
    first, second = served
    assert (first["addr"], first["readonly"]) == ("127.0.0.1:0", True)
    assert dict(first["tokens"]) == {"s3cret-s3cret-s3cret": "write"}
    assert first["metrics_address"] == "127.0.0.1:1"
    assert (second["addr"], second["readonly"]) == ("127.0.0.1:2", False)
    found = shown(here("config", "show", "--json"))
    assert found["registry.readonly"] == (False, "AIMAGE_REGISTRY_READONLY")
    assert found["registry.addr"] == ("127.0.0.1:0", str(file))
    assert found["registry.logLevel"] == ("info", "default")


@pytest.mark.parametrize("verb", [("registry", "serve"), ("config", "show")])
def test_wrong_settings_of_the_registry_are_refused(
    aimage: Callable[..., Aimage], verb: tuple[str, ...], tmp_path: Path
) -> None:
    here, file = aimage(), tmp_path / "mine.json"
    file.write_text('{"registry": {"adr": "x"}}')
    for name, text, message in (
        ("AIMAGE_REGISTRY_ADR", "127.0.0.1:0", "did you mean AIMAGE_REGISTRY_ADDR?"),
        ("AIMAGE_REGISTRY_READONLY", "flase", "AIMAGE_REGISTRY_READONLY"),
        ("AIMAGE_CONFIG", file, "unknown key 'adr'; did you mean 'addr'? (at registry)"),
    ):
        here.environment[name] = str(text)
        assert message in here(*verb, code=2).err
        del here.environment[name]


def test_variables_of_a_kubernetes_service_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVICE_HOST", "SERVICE_PORT", "PORT", "PORT_8050_TCP_ADDR", "SERVICE_PORT_HTTP"):
        monkeypatch.setenv(f"AIMAGE_SERVE_{name}", "10.0.0.1")
    assert gather(Settings, {}, None)[1] == {}
