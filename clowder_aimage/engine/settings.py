"""How a worker is set up: by the command line, the environment, the configuration, in this order.

The configuration is the project's one file (schemas/config.schema.json); the worker's part of it
is the object ``worker``, whose keys are the names of fields in camel case: ``maxModels`` in the
file is AIMAGE_SERVE_MAX_MODELS in the environment and ``--max-models`` on the command line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from clowder_aimage import schema
from clowder_aimage.content.unit import parse_size
from clowder_aimage.engine.limits import FOR_EVER, EngineLimits
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference

DEFAULT_ADDRESS = "127.0.0.1:11434"
PREFIX = "AIMAGE_SERVE_"
LONGEST = 100 * 365 * 86400.0  # seconds that are not for ever
_PARTS = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_URL = re.compile(
    r"https?://([A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?"
    r"(/[A-Za-z0-9._~!$&'()*+,;=:%-]+)*"
)
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}


def duration(value: object) -> float:
    """Seconds: 90, "90s", "5m", "1h30m", "500ms" (as Go writes them); what is negative, or longer
    than a hundred years, is for ever.

    Raises:
        ValueError: it is no duration.
    """
    is_nan = isinstance(value, float) and math.isnan(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and not is_nan:
        return FOR_EVER if value < 0 or value >= LONGEST else float(value)
    text = str(value).strip().lower()
    sign, text = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", text):
        seconds = float(text)
    elif text and not _PARTS.sub("", text):
        seconds = sum(float(count) * _UNITS[unit] for count, unit in _PARTS.findall(text))
    else:
        raise ValueError(f"{str(value)!r} is not a duration such as 90, 30s, 5m or 1h30m")
    return FOR_EVER if (sign < 0 and seconds) or seconds >= LONGEST else seconds


def _limit(value: object) -> float:
    """A duration that limits something; 0 does not."""
    return duration(value) or FOR_EVER


def _size(value: object) -> int | None:
    """Bytes: a number, or as people write it."""
    if value is None or (type(value) is int and value >= 0):
        return value
    return parse_size(str(value))


def _pairs(value: object) -> object:
    """``NAME=REF,NAME=REF``."""
    if not isinstance(value, str):
        return value
    found = {}
    for part in filter(None, map(str.strip, value.split(","))):
        name, equals, reference = part.partition("=")
        if not equals or not name or not reference:
            raise ValueError(f"{part!r} is not NAME=REF")
        found[name.strip()] = reference.strip()
    return found


def _words(value: object) -> object:
    return (
        tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value
    )


def _base(value: object) -> str | None:
    """What links begin with: a scheme, a host, perhaps a port and a path (RFC 3986, 3)."""
    if value is None:
        return None
    text = str(value).strip().rstrip("/")
    if _URL.fullmatch(text) is None:
        raise ValueError("it must be a URL such as https://pictures.example.com, and no more")
    return text


def _reference(text: str) -> str:
    try:
        Reference.parse(text)
    except UsageError as error:
        raise ValueError(error.message) from None
    return text


Name = Annotated[str, BeforeValidator(lambda value: _reference(str(value)))]
Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)]
_ListeningT = TypeVar("_ListeningT", bound="Listening")


class Listening(BaseSettings):
    """What every server can be told. Made by ``effective``. ``SECTION`` is the part of the
    configuration that is meant, ``ADDRESS`` the usual place."""

    model_config = SettingsConfigDict(extra="ignore", frozen=True)
    SECTION: ClassVar[str]
    ADDRESS: ClassVar[str]

    addr: str | None = None
    socket: Path | None = None
    token_file: Path | None = None
    allow_hosts: Words = ()
    grace: Annotated[float, BeforeValidator(duration)] = 30.0
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Ours alone: no file in the working directory says anything."""
        return (init_settings,)

    @property
    def address(self) -> str | None:
        """Where to listen on TCP: the usual place unless something else was said."""
        return self.addr or (None if self.socket else self.ADDRESS)


class Settings(Listening):
    """What a worker can be told."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)
    SECTION = "worker"
    ADDRESS = DEFAULT_ADDRESS

    public_url: Annotated[str | None, BeforeValidator(_base)] = None
    max_models: int = Field(1, ge=1)
    text_encoder: Literal["auto", "keep", "release"] = "auto"
    memory: Annotated[int | None, BeforeValidator(_size)] = None
    queue: int = Field(8, ge=0)
    keep_alive: Annotated[float, BeforeValidator(duration)] = 300.0
    deadline: Annotated[float, BeforeValidator(_limit)] = FOR_EVER
    default_model: Name | None = None
    aliases: Annotated[dict[str, Name], NoDecode, BeforeValidator(_pairs)] = {}
    wanted: Annotated[tuple[Name, ...], NoDecode, BeforeValidator(_words)] = ()
    pull: Literal["never", "if-missing", "always"] = "if-missing"
    stream_format: Literal["auto", "openai", "openai+progress", "ollama"] = "auto"
    png_facts: bool = True
    dtype: Literal["float32", "f32", "bfloat16", "bf16"] | None = None

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(
            queue=self.queue,
            models=self.max_models,
            keep_alive=self.keep_alive,
            deadline=self.deadline,
            dtype=self.dtype,
            text_encoder=self.text_encoder,
            memory=self.memory,
        )


def effective(options: Mapping[str, Any], file: Path | None) -> tuple[Settings, dict[str, str]]:
    """A worker's settings, and where each comes from that is no default. Raises UsageError."""
    return gather(Settings, options, file)


def gather(
    kind: type[_ListeningT], options: Mapping[str, Any], file: Path | None
) -> tuple[_ListeningT, dict[str, str]]:
    """The settings of a ``kind`` of server, and where each comes from that is no default.

    Raises:
        UsageError: the file cannot be used, or something cannot be meant; it says what and where.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    said = {key: value for key, value in options.items() if value not in (None, (), {})}
    for found, place in (
        (read_section(file, kind) if file else {}, f"{file}"),
        (_environment(kind), "environment"),
        (said, "command line"),
    ):
        for key, value in found.items():
            values[key] = value
            origins[key] = f"{_prefix(kind)}{key.upper()}" if place == "environment" else place
    try:
        return kind(**values), origins
    except ValidationError as error:
        raise UsageError(_sentence(error, origins)) from None


def _prefix(kind: type[Listening]) -> str:
    return str(kind.model_config.get("env_prefix", ""))


def _environment(kind: type[Listening]) -> dict[str, Any]:
    from pydantic_settings import EnvSettingsSource

    return {key: value for key, value in EnvSettingsSource(kind)().items() if value != ""}


def read_section(file: Path, kind: type[Listening] = Settings) -> dict[str, Any]:
    """Return a server's section of a configuration, by the names of fields. Raises UsageError."""
    section = schema.read_configuration(file, lambda document: document.get(kind.SECTION, {}))
    found = {_snake(key): value for key, value in section.items()}
    for name in ("socket", "token_file", "desired"):
        if name in found:  # a relative path begins at the configuration
            found[name] = str(file.parent / found[name])
    return {key: value for key, value in found.items() if key in kind.model_fields}


def _snake(name: str) -> str:
    return re.sub(r"[A-Z]", lambda found: f"_{found[0].lower()}", name)


def camel(name: str) -> str:
    """What a field is called in the configuration."""
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def _sentence(error: ValidationError, origins: Mapping[str, str]) -> str:
    first = error.errors(include_url=False)[0]
    if not first["loc"]:  # two of them do not go together
        return first["msg"].removeprefix("Value error, ")
    name = str(first["loc"][0])
    place = origins.get(name, "")
    option = "--" + {"aliases": "alias", "allow_hosts": "allow-host"}.get(name, name)
    what = option.replace("_", "-") if place == "command line" else camel(name)
    where = "" if place == "command line" else f" ({place})"
    return f"{what}{where}: {first['msg'].removeprefix('Value error, ')}"
