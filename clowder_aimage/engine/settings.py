"""Settings of a server, from the command line, the environment and the configuration.

The configuration is one file (schemas/config.schema.json). Its object ``worker`` has the fields in
camel case: ``maxModels`` in the file is AIMAGE_SERVE_MAX_MODELS in the environment.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
)
from pydantic.alias_generators import to_camel

from clowder_aimage.config.user_directory import check_variables
from clowder_aimage.content.unit import parse_size
from clowder_aimage.document.schema import read_configuration
from clowder_aimage.engine.admission import FOR_EVER, EngineLimits
from clowder_aimage.engine.endpoint import DEFAULT_HOST
from clowder_aimage.errors import UsageError
from clowder_aimage.model.batch_table import parse_batch
from clowder_aimage.oci import Reference
from clowder_aimage.pictures.provenance.signing_settings import SigningSettings
from clowder_aimage.registry.web_file import InputHosts
from clowder_aimage.tensor.quantization import parse_precision

# The name of a field in the configuration
camel = to_camel
# Seconds; longer durations are unlimited
MAX_DURATION = 100 * 365 * 86400.0
_PARTS = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
# Matches durations in lower case
DURATION = rf"[+-]?([0-9]+(\.[0-9]*)?|({_PARTS.pattern})+)"
_URL = re.compile(
    r"https?://([A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?"
    r"(/[A-Za-z0-9._~!$&'()*+,;=:%-]+)*"
)
_DEVICE = re.compile(r"cpu|mps|cuda(:[0-9]{1,3})?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}


def parse_duration(value: object) -> float:
    """Parse 90, "90s", "5m", "1h30m" or "500ms" (Go's durations) into seconds.

    Negative durations and those above MAX_DURATION become FOR_EVER. Raises ValueError.
    """
    is_nan = isinstance(value, float) and math.isnan(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and not is_nan:
        return FOR_EVER if value < 0 or value >= MAX_DURATION else float(value)
    text = str(value).strip().lower()
    sign, text = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", text):
        seconds = float(text)
    elif text and not _PARTS.sub("", text):
        seconds = sum(float(count) * _UNITS[unit] for count, unit in _PARTS.findall(text))
    else:
        raise ValueError(f"invalid duration {str(value)!r} (examples: 90, 30s, 5m, 1h30m)")
    return FOR_EVER if (sign < 0 and seconds) or seconds >= MAX_DURATION else seconds


def _parse_size(value: object) -> int | None:
    """Parse a number of bytes from a number or a string such as "12GiB"."""
    if value is None or (type(value) is int and value >= 0):
        return value
    return parse_size(str(value))


def _parse_pairs(value: object, kind: str, form: str) -> object:
    if not isinstance(value, str):
        return value
    pairs = {}
    for pair in filter(None, map(str.strip, value.split(","))):
        name, equals, reference = pair.partition("=")
        if not equals or not name or not reference:
            raise ValueError(f"invalid {kind} {pair!r}, expected {form}")
        pairs[name.strip()] = reference.strip()
    return pairs


_ALIASES = BeforeValidator(partial(_parse_pairs, kind="alias", form="NAME=REF"))
_BACKENDS = BeforeValidator(partial(_parse_pairs, kind="backend", form="NAME=BACKEND"))


def _list(value: object) -> object:
    if not isinstance(value, str):
        return value
    return tuple(filter(None, map(str.strip, value.split(","))))


def _parse_base_url(value: object) -> str | None:
    """Validate the base of links: scheme, host, optional port and path (RFC 3986, 3)."""
    if value is None:
        return None
    text = str(value).strip().rstrip("/")
    if _URL.fullmatch(text) is None:
        raise ValueError("expected a base URL such as https://pictures.example.com")
    return text


def _parse_origins(value: object) -> object:
    """Validate origins of web pages: scheme, host and optional port (RFC 6454, 6.2)."""
    origins = _list(value)
    if not isinstance(origins, tuple | list):
        return origins
    origins = tuple(str(origin).lower().removesuffix("/") for origin in origins)
    for origin in origins:
        if _ORIGIN.fullmatch(origin) is None:
            raise ValueError(f"invalid origin {origin!r}; expected one such as https://app.example")
    return origins


def _parse_inputs(value: object) -> object:
    """Validate hosts of pictures to fetch: HOST, HOST:PORT, *.DOMAIN or *."""
    hosts = _list(value)
    return InputHosts.parse(map(str, hosts)).entries if isinstance(hosts, tuple | list) else hosts


def _check_device(value: object) -> object:
    if value is not None and _DEVICE.fullmatch(str(value)) is None:
        raise ValueError(f"unknown device {value!r}: use cuda, cuda:1 and so on, mps or cpu")
    return value


def _check_reference(value: object) -> str:
    try:
        Reference.parse(str(value))
    except UsageError as error:
        raise ValueError(error.message) from None
    return str(value)


Name = Annotated[str, BeforeValidator(_check_reference)]
Origins = Annotated[tuple[str, ...], BeforeValidator(_parse_origins)]
Words = Annotated[tuple[str, ...], BeforeValidator(_list)]
Seconds = Annotated[float, BeforeValidator(parse_duration)]
Size = Annotated[int, BeforeValidator(_parse_size)]
# 0 means no limit
Limit = Annotated[float, BeforeValidator(lambda value: parse_duration(value) or FOR_EVER)]
ServerSettingsT = TypeVar("ServerSettingsT", bound="ServerSettings")


class ServerSettings(BaseModel):
    """Settings common to all servers, created by ``gather``.

    ``SECTION`` is the object in the configuration, ``PREFIX`` that of the environment variables,
    ``PATHS`` the fields whose relative paths are resolved against the configuration's directory.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)
    SECTION: ClassVar[str]
    PREFIX: ClassVar[str]
    ADDRESS: ClassVar[str]
    PATHS: ClassVar[tuple[str, ...]] = ("socket", "token_file")

    addr: str | None = None
    socket: Path | None = None
    token_file: Path | None = None
    allow_remote: bool = False
    allow_hosts: Words = ()
    metrics_addr: str | None = None
    grace: Seconds = 30.0
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def address(self) -> str | None:
        """The address to listen on; None to listen on the socket only."""
        return self.addr or (None if self.socket else self.ADDRESS)


class CallerSettings(ServerSettings):
    """Settings of a server whose clients keep files and begin batches: the bounds of each token."""

    caller_bytes: Size = 10 << 30
    caller_batches: int = Field(default=100, ge=1)
    caller_body_bytes: Size = 256 << 20


class Settings(CallerSettings):
    """Settings of a worker."""

    SECTION = "worker"
    PREFIX = "AIMAGE_SERVE_"
    ADDRESS = DEFAULT_HOST
    PATHS = (*ServerSettings.PATHS, "lora_dir")

    allow_origins: Origins = ()
    allow_inputs: Annotated[tuple[str, ...], BeforeValidator(_parse_inputs)] = ()
    public_url: Annotated[str | None, BeforeValidator(_parse_base_url)] = None
    max_models: int | None = Field(default=None, ge=1)
    text_encoder: Literal["auto", "keep", "release"] = "auto"
    memory: Annotated[int | None, BeforeValidator(_parse_size)] = None
    queue: int = Field(default=8, ge=0)
    max_wait: Seconds = 30.0
    keep_alive: Seconds = 300.0
    deadline: Limit = FOR_EVER
    text_deadline: Limit = 600.0
    picture_deadline: float = Field(default=20.0, ge=0, le=1e6)
    default_model: Name | None = None
    enhancer: Name | None = None
    default_for: Words = ("dall-e-2", "dall-e-3", "gpt-image-*", "chatgpt-image-*")
    aliases: Annotated[dict[str, Name], _ALIASES] = {}
    wanted: Annotated[tuple[Name, ...], BeforeValidator(_list)] = ()
    pull: Literal["never", "if-missing", "always"] = "if-missing"
    stream_format: Literal["auto", "openai", "openai+progress", "ollama"] = "auto"
    png_facts: bool = True
    mark: bool = True
    sign: bool = True
    page: bool = True
    backend: Literal["auto", "mlx", "torch"] = "auto"
    backends: Annotated[dict[Name, Literal["auto", "mlx", "torch"]], _BACKENDS] = {}
    compile: Literal["never", "background", "now"] | None = None
    attention: str | None = None
    reproducible: bool = False
    batch: Annotated[int | None, BeforeValidator(parse_batch)] = None
    device: Annotated[str | None, BeforeValidator(_check_device)] = None
    compute: Literal["fp8"] | None = None
    dtype: Literal["float32", "f32", "bfloat16", "bf16"] | None = None
    first: Annotated[str | None, BeforeValidator(lambda text: parse_precision(str(text)))] = None
    lora_dir: Path | None = None
    parallel: int = Field(default=16, ge=1, le=256)
    context: int | None = Field(default=None, ge=16)
    reserve: Size = 1 << 30
    join: str | None = None
    worker_name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    # Of the object ``picture`` of the configuration, not of the worker's
    _signing: SigningSettings | None = PrivateAttr(default=None)

    def with_signing(self, signing: SigningSettings | None) -> Settings:
        """Return the settings of a worker that signs pictures with a key, or with none."""
        changed = self.model_copy()
        changed._signing = signing  # noqa: SLF001 - of the same class
        return changed

    @property
    def limits(self) -> EngineLimits:
        shared_names = {
            "queue",
            "max_wait",
            "keep_alive",
            "deadline",
            "text_deadline",
            "picture_deadline",
            "backend",
            "compile",
            "attention",
            "device",
            "compute",
            "reproducible",
            "batch",
            "dtype",
            "text_encoder",
            "memory",
            "first",
            "mark",
        }
        shared_names |= {"parallel", "context"}
        lora_dir = None if self.lora_dir is None else str(self.lora_dir.absolute())
        shared = self.model_dump(include=shared_names)
        shared["signing"] = self._signing
        backends = {str(Reference.parse(name)): backend for name, backend in self.backends.items()}
        enhancer = self.aliases.get(self.enhancer, self.enhancer) if self.enhancer else None
        shared["enhancer"] = str(Reference.parse(enhancer)) if enhancer else None
        return EngineLimits(models=self.max_models, lora_dir=lora_dir, backends=backends, **shared)


def gather(
    kind: type[ServerSettingsT],
    options: Mapping[str, Any],
    file: Path | None,
    spell: Callable[[str], str] = camel,
) -> tuple[ServerSettingsT, dict[str, str]]:
    """Return the settings of a server, and the origin of each non-default setting.

    The origin is the file, an environment variable, or "command line" for ``options``; ``spell``
    returns the name of an option. Raises UsageError with the origin.
    """
    check_variables(kind.SECTION)
    section = read_section(file, kind)
    stated = {name: (value, str(file)) for name, value in section.items()}
    for name in kind.model_fields:
        if value := os.environ.get(variable := f"{kind.PREFIX}{name.upper()}"):
            stated[name] = value, variable
    for name, value in options.items():
        if value not in (None, (), {}):
            stated[name] = value, "command line"
    origins = {name: origin for name, (_, origin) in stated.items()}
    try:
        return kind(**{name: value for name, (value, _) in stated.items()}), origins
    except ValidationError as error:
        raise UsageError(_describe_error(error, origins, spell)) from None


def read_section(file: Path | None, kind: type[ServerSettings] = Settings) -> dict[str, Any]:
    """Return a server's section of a configuration, by field. Raises UsageError."""
    section = read_configuration(file, lambda document: document.get(kind.SECTION, {}))
    values = {name: section[key] for name in kind.model_fields if (key := camel(name)) in section}
    directory = file.parent if file else Path()
    paths = {name: str(directory / values[name]) for name in kind.PATHS if name in values}
    return values | paths


def _describe_error(
    error: ValidationError, origins: Mapping[str, str], spell: Callable[[str], str]
) -> str:
    details = error.errors(include_url=False)[0]
    message = details["msg"].removeprefix("Value error, ")
    # An error of several fields
    if not details["loc"]:
        return message
    name = str(details["loc"][0])
    origin = origins.get(name, "")
    if origin == "command line":
        return f"{spell(name)}: {message}"
    return f"{camel(name)} ({origin}): {message}"
